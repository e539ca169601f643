"""A flow's HTTP client of the gateway: the flow routes with the flow token, generation with the model token.

Connections belong to an event loop: rollouts of the same loop share them, through their context; in another loop each call opens
its own.
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
"""How often a generation is tried if the gateway or the engine is too busy; the vendors' clients try as often."""
RETRY_STATUSES = (429, 503)
_MAX_RETRY_AFTER_S = 30.0
_MAX_QUOTED_CHARS = 300


class TrajectoryEndpoint(NamedTuple):
    """The endpoint of a rollout that was opened at the gateway."""

    trajectory_uid: str
    base_url: str
    """For any OpenAI client; its path names the rollout."""


class FlowConnections:
    """HTTP connections to share; `shut` closes them."""

    def __init__(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
        )

    async def shut(self) -> None:
        await self.session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowClient:
    """The calls of one rollout's flow. Each raises RequestError with the gateway's message, status and code if it is refused."""

    root: str
    """The gateway's URL, without a trailing slash."""
    model_token: str = field(default="", repr=False)
    """Empty for a gateway in open mode."""
    flow_token: str = field(default="", repr=False)
    """As `model_token`."""
    clients: Clients | None = None

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        for left in reversed(range(TRIES)):
            try:
                return await self._post(f"{self.root}/generate", body, self.model_token)
            except _RefusedRequest as error:
                if error.status not in RETRY_STATUSES or error.retry_after_s is None or not left:
                    raise
                await asyncio.sleep(error.retry_after_s)
        raise AssertionError  # the last try raises

    async def submit(self, steps: list[dict[str, Any]], channel: str) -> int:
        """Submits steps; returns how many were accepted."""
        answer = await self._post(f"{self.root}/submit_steps", {"steps": steps}, self.flow_token, params={"channel": channel})
        return int(answer["accepted"])

    async def compute_reward(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._post(f"{self.root}/compute_reward", body, self.flow_token)

    async def begin(self) -> TrajectoryEndpoint:
        """Returns the rollout of the flow token; in open mode, opens a new one."""
        answer = await self._post(f"{self.root}/init_trajectory", {}, self.flow_token)
        return TrajectoryEndpoint(answer["trajectory_uid"], answer["base_url"])

    async def register(self, base_url: str, channel: str, metadata: Mapping[str, Any]) -> None:
        """Registers the rollout behind `base_url`."""
        await self._post(f"{base_url.rstrip('/')}/register_trajectory", {"channel": channel, "metadata": metadata}, self.flow_token)

    async def complete(self, base_url: str, channel: str, reward: float | None) -> None:
        """Completes the rollout behind `base_url`; without a reward it is left to the grader."""
        await self._post(f"{base_url.rstrip('/')}/complete_trajectory", {"channel": channel, "reward": reward}, self.flow_token)

    async def _post(self, url: str, body: Mapping[str, Any], token: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
        what = f"POST {url.removeprefix(self.root)}"
        if not self.root:
            raise ConfigError(f"{what}: this flow has no gateway; run it with `penstock train`, or give it gateway_url=…")
        try:
            async with (
                self._session() as session,
                session.post(url, data=_encode(body, what), headers=headers, params=params, allow_redirects=False) as answer,
            ):
                return _read(what, answer, await answer.read())
        except (aiohttp.ClientError, TimeoutError) as cause:
            reason = str(cause) or type(cause).__name__
            text = f"{what}: the gateway at {self.root} gave no answer: {reason}; check that it runs and can be reached from here"
            raise RequestError(text, status=502, code="unreachable") from cause

    @asynccontextmanager
    async def _session(self) -> AsyncGenerator[aiohttp.ClientSession]:
        secure = self.root.startswith("https:")
        shared = self.clients.get_or_make(("aiohttp", secure), FlowConnections) if self.clients else None
        if shared is not None:
            yield shared.session
            return
        own = FlowConnections()
        try:
            yield own.session
        finally:
            await own.shut()


class _RefusedRequest(RequestError):
    """A refusal, with the seconds of its Retry-After header, if any."""

    retry_after_s: float | None = None


def _encode(body: Mapping[str, Any], what: str) -> bytes:
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
    message, code = _error_message(body, text)
    refused = _RefusedRequest(f"{what}: {answer.status}: {message}", status=answer.status, code=code)
    pause = answer.headers.get("retry-after", "")
    refused.retry_after_s = min(float(pause), _MAX_RETRY_AFTER_S) if pause.isdigit() else None
    raise refused


def _error_message(body: Any, text: bytes) -> tuple[str, str]:
    """Returns the message and the code of a refusal, in whichever form it came."""
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
    return text.decode("utf-8", "replace")[:_MAX_QUOTED_CHARS] or "no words", "refused"


def _flaw(entry: Any) -> str:
    """Formats one entry of a validation error's `detail`."""
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"msg": entry}
    where = ".".join(str(part) for part in fields.get("loc", ()))
    return f"{where}: {fields.get('msg')}" if where else str(fields.get("msg"))
