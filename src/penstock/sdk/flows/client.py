"""A flow's way to the gateway over HTTP: its own routes with the flow token, generation with the model token.

Connections belong to an event loop: rollouts of the same loop share them, through their context; elsewhere a call opens its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import aiohttp
import orjson

from penstock.errors import ConfigError, RequestError
from penstock.sdk.clients import Clients

TIMEOUT_S = 600.0
TRIES = 3
"""Of a generation that the gateway or the engine was too busy for: as many as the vendors' clients make."""
RETRY_STATUSES = (429, 503)
_LONGEST_PAUSE_S = 30.0
_WORDS = 300


class TrajectoryEndpoint(NamedTuple):
    """A rollout that an agent may call the model in."""

    trajectory_uid: str
    base_url: str
    """For any OpenAI client; what belongs to the rollout is in its path."""


class FlowConnections:
    """HTTP connections to keep and share; `shut` closes them."""

    def __init__(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
        )

    async def shut(self) -> None:
        """Close them, for everyone."""
        await self.session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowClient:
    """Calls of one rollout's flow. Each raises RequestError with the gateway's own words, status and code where it is refused."""

    root: str
    """Of the gateway, without a slash at its end."""
    model_token: str = field(default="", repr=False)
    """Empty for a gateway that asks for none."""
    flow_token: str = field(default="", repr=False)
    """The same."""
    clients: Clients | None = None

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One reply of the model, recorded."""
        for left in reversed(range(TRIES)):
            try:
                return await self._post(f"{self.root}/generate", body, self.model_token)
            except _Refused as error:
                if error.status not in RETRY_STATUSES or error.retry_after_s is None or not left:
                    raise
                await asyncio.sleep(error.retry_after_s)
        raise AssertionError  # the last try raises

    async def submit(self, steps: list[dict[str, Any]], channel: str) -> int:
        """Hand in steps; how many were taken."""
        answer = await self._post(f"{self.root}/submit_steps", {"steps": steps}, self.flow_token, params={"channel": channel})
        return int(answer["accepted"])

    async def compute_reward(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the run's judge."""
        return await self._post(f"{self.root}/compute_reward", body, self.flow_token)

    async def begin(self) -> TrajectoryEndpoint:
        """The rollout that the flow token belongs to; in open mode, a new one."""
        answer = await self._post(f"{self.root}/init_trajectory", {}, self.flow_token)
        return TrajectoryEndpoint(answer["trajectory_uid"], answer["base_url"])

    async def register(self, base_url: str, channel: str, metadata: Mapping[str, Any]) -> None:
        """Say what the calls under `base_url` belong to."""
        await self._post(f"{base_url.rstrip('/')}/register_trajectory", {"channel": channel, "metadata": metadata}, self.flow_token)

    async def complete(self, base_url: str, channel: str, reward: float | None) -> None:
        """No more calls come under `base_url`; None leaves the verdict to the grader."""
        await self._post(f"{base_url.rstrip('/')}/complete_trajectory", {"channel": channel, "reward": reward}, self.flow_token)

    async def _post(self, url: str, body: Mapping[str, Any], token: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
        what = f"POST {url.removeprefix(self.root)}"
        if not self.root:
            raise ConfigError(f"{what}: this flow has no gateway; run it with `penstock train`, or give it gateway_url=…")
        try:
            async with (
                self._session() as session,
                session.post(url, data=_written(body, what), headers=headers, params=params, allow_redirects=False) as answer,
            ):
                return _read(what, answer, await answer.read())
        except (aiohttp.ClientError, TimeoutError) as cause:
            reason = str(cause) or type(cause).__name__
            text = f"{what}: the gateway at {self.root} gave no answer: {reason}; check that it runs and can be reached from here"
            raise RequestError(text, status=502, code="unreachable") from cause

    @asynccontextmanager
    async def _session(self) -> AsyncGenerator[aiohttp.ClientSession]:
        secure = self.root.startswith("https:")
        shared = self.clients.kept(("aiohttp", secure), FlowConnections) if self.clients else None
        if shared is not None:
            yield shared.session
            return
        own = FlowConnections()
        try:
            yield own.session
        finally:
            await own.shut()


class _Refused(RequestError):
    """With the seconds after which to ask again; None where that is no use."""

    retry_after_s: float | None = None


def _written(body: Mapping[str, Any], what: str) -> bytes:
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except TypeError as cause:
        raise ValueError(f"{what}: cannot be written as JSON: {cause}; give plain values") from cause


def _read(what: str, answer: aiohttp.ClientResponse, text: bytes) -> dict[str, Any]:
    try:
        body: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    if answer.status == 200 and isinstance(body, dict):
        return cast("dict[str, Any]", body)
    message, code = _words(body, text)
    refused = _Refused(f"{what}: {answer.status}: {message}", status=answer.status, code=code)
    pause = answer.headers.get("retry-after", "")
    refused.retry_after_s = min(float(pause), _LONGEST_PAUSE_S) if pause.isdigit() else None
    raise refused


def _words(body: Any, text: bytes) -> tuple[str, str]:
    """The message and the code of a refusal, in whichever form it came."""
    if isinstance(body, dict):
        fields = cast("dict[str, Any]", body)
        error: Any = fields.get("error") or fields.get("detail")
        if isinstance(error, list):
            error = "; ".join(_flaw(each) for each in cast("list[Any]", error))
        if isinstance(error, dict):
            inner = cast("dict[str, Any]", error)
            return str(inner.get("message") or inner), str(inner.get("code") or fields.get("code") or "refused")
        if error:
            return str(error), str(fields.get("code") or "refused")
    return text.decode("utf-8", "replace")[:_WORDS] or "no words", "refused"


def _flaw(entry: Any) -> str:
    """One thing that is wrong with a body, and where, as servers of this kind list them."""
    told = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"msg": entry}
    where = ".".join(str(part) for part in told.get("loc", ()))
    return f"{where}: {told.get('msg')}" if where else str(told.get("msg"))
