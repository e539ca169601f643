"""The client side of rollout servers: submits a rollout to the least busy one, asks for its status, cancels it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from urllib.parse import quote

import aiohttp
import orjson

from penstock.engines.retry import backoff_s
from penstock.errors import WorkflowError
from penstock.http.client import retry_after_s
from penstock_compat.rollout_server.protocol import RolloutState

CONNECT_S = 5.0
RESPONSE_S = 30.0
"""For the response to a request; a server accepts a rollout before it runs it."""
SKIP_S = 5.0
"""How long a server that could not be reached is only tried after all others."""
KEEPALIVE_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn closes its end."""
CANCEL_S = 5.0
SHORTEST_WAIT_S = 0.05
MAX_QUOTED_CHARS = 300
"""How much of a server's message is quoted in ours."""
UNAUTHORIZED = (401, 403)


class HostStatus(NamedTuple):
    """A rollout's state on a server."""

    state: RolloutState
    message: str
    """Why the state is unknown: the server does not know the rollout, or cannot be asked."""


class HostResponse(NamedTuple):
    status: int
    """0: the request was not sent. -1: it is unknown whether it arrived."""
    message: str
    body: Any = None
    retry_after_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_final(self) -> bool:
        """Repeating the request, to this server or another, would not help."""
        return 300 <= self.status < 500 and self.status != 429

    @property
    def is_not_accepted(self) -> bool:
        """The server certainly does not have the rollout: another one may be asked."""
        return self.status in (0, 429, 503)


class Host:
    """One rollout server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.rollouts = 0
        """How many of ours it runs."""
        self.last_request = 0
        """The number of the last submission to it."""
        self.skip_until = 0.0
        self.separate_keys: bool | None = None
        """Whether it takes a key for the model besides `controller_api_key`, which is for callbacks; None: not known."""


MakeBody = Callable[[bool], bytes]
"""Makes the request for a server, given its `separate_keys`."""


class ServerHosts:
    """All servers, on one connection pool that is open while the `async with` lasts."""

    def __init__(self, urls: Sequence[str], token: str) -> None:
        self._hosts = [Host(url) for url in urls]
        self._token = token
        self._requests = 0
        self._last_progress = 0.0
        """When a server last accepted or finished a rollout."""
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=RESPONSE_S, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def unusable(self) -> dict[str, str]:
        """Returns the servers that cannot be used, with the reasons."""
        async with asyncio.TaskGroup() as group:
            checks = {host.url: group.create_task(self._check(host)) for host in self._hosts}
        return {url: task.result() for url, task in checks.items() if task.result()}

    async def submit(self, make_body: MakeBody, rollout_id: str, ended: asyncio.Future[Any], *, limit_s: float) -> Host:
        """Submits a rollout to the least busy server that accepts it; WorkflowError if none does.

        A busy server is asked again after its Retry-After, until no server has made progress for `limit_s`. If a server may have
        accepted the rollout but its response was lost, only that one is asked again: no rollout runs twice. It stops asking once
        `ended` is done.
        """
        started, rounds, tried = time.monotonic(), 0, dict[Host, HostResponse]()
        bound: Host | None = None
        while True:
            host = bound or self._pick(tried)
            response = await self._submit_to(host, make_body, rollout_id)
            if response.is_ok or ended.done():
                self._last_progress = time.monotonic()
                host.rollouts += 1
                return host
            if response.is_final:
                raise WorkflowError(_refusal(response))
            tried[host] = response
            bound = bound if response.is_not_accepted else host
            if bound is None and len(tried) < len(self._hosts):
                continue
            wait_s = max(SHORTEST_WAIT_S, backoff_s(rounds, retry_after_s=min(each.retry_after_s for each in tried.values())))
            if time.monotonic() + wait_s > max(started, self._last_progress) + limit_s:
                if bound is not None:
                    await self.cancel(bound, rollout_id)
                raise WorkflowError(_not_accepted(tried, limit_s))
            await asyncio.wait({ended}, timeout=wait_s)
            rounds += 1
            tried.clear()

    def release(self, host: Host) -> None:
        """Notes that the server has finished a rollout."""
        host.rollouts -= 1
        self._last_progress = time.monotonic()

    async def status(self, host: Host, rollout_id: str) -> HostStatus:
        response = await self._request(host, "GET", f"/rollout/{quote(rollout_id, safe='')}/status")
        body = cast("dict[str, Any]", response.body) if response.is_ok and isinstance(response.body, dict) else {}
        with suppress(ValueError):
            return HostStatus(RolloutState(body.get("status")), f"{host.url} does not know it")
        return HostStatus(RolloutState.UNKNOWN, response.message)

    async def cancel(self, host: Host, rollout_id: str) -> None:
        """Asks a server to stop a rollout. A failure is ignored: the server's callbacks will be dropped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self._request(host, "POST", "/rollout/cancel", orjson.dumps({"ids": [rollout_id]}))

    def _pick(self, tried: dict[Host, HostResponse]) -> Host:
        now = time.monotonic()
        untried = [host for host in self._hosts if host not in tried]
        return min(untried, key=lambda host: (host.skip_until > now, host.rollouts, host.last_request))

    async def _submit_to(self, host: Host, make_body: MakeBody, rollout_id: str) -> HostResponse:
        self._requests += 1
        host.last_request = self._requests
        if host.separate_keys is None:
            await self._read_health(host)
        try:
            response = await self._request(host, "POST", "/rollout", make_body(bool(host.separate_keys)))
        except asyncio.CancelledError:
            await self.cancel(host, rollout_id)  # the server may have accepted it
            raise
        host.skip_until = 0.0
        if response.status <= 0:  # it may be another server when it comes back
            host.skip_until, host.separate_keys = time.monotonic() + SKIP_S, None
        return response

    async def _read_health(self, host: Host) -> HostResponse:
        health = await self._request(host, "GET", "/health")
        if health.is_ok:
            body = cast("dict[str, Any]", health.body) if isinstance(health.body, dict) else {}
            host.separate_keys = body.get("separate_keys") is True
        return health

    async def _check(self, host: Host) -> str:
        """Returns why a server cannot be used, or an empty string."""
        health = await self._read_health(host)
        if not health.is_ok:
            host.skip_until = time.monotonic() + SKIP_S
            return health.message
        status = await self._request(host, "GET", "/rollout/-/status")  # unlike /health, this needs the token
        return _refusal(status) if status.status in UNAUTHORIZED else ""

    async def _request(self, host: Host, method: str, path: str, body: bytes | None = None) -> HostResponse:
        url = host.url + path
        try:
            async with self._session.request(method, url, data=body, allow_redirects=False) as response:
                text = (await response.content.read(1 << 20)).decode("utf-8", "replace")
                parsed = _json(text)
                status_line = f"{url} answered {response.status} {response.reason or ''}".rstrip()
                quoted = self._quote(_message(parsed) or text)
                after_s = retry_after_s(response.headers.get("retry-after"))
                return HostResponse(response.status, f"{status_line}{': ' + quoted if quoted else ''}", parsed, after_s)
        except aiohttp.ClientConnectorError as cause:
            return HostResponse(0, f"{url}: {self._quote(str(cause))}")
        except aiohttp.ConnectionTimeoutError:
            return HostResponse(0, f"{url}: no connection within {CONNECT_S:g} s")
        except TimeoutError:
            return HostResponse(-1, f"{url} was silent for {RESPONSE_S:g} s")
        except (aiohttp.ClientError, OSError) as cause:
            return HostResponse(-1, f"{url}: {self._quote(str(cause)) or type(cause).__name__}")

    def _quote(self, text: str) -> str:
        """Returns the beginning of a server's message on one line, without our token."""
        line = " ".join((text.replace(self._token, "…") if self._token else text).split())
        return line if len(line) <= MAX_QUOTED_CHARS else f"{line[:MAX_QUOTED_CHARS]}…"


def _json(text: str) -> Any:
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(text)
    return None


def _message(body: Any) -> str:
    """Returns the message in an error's body: `error.message`, `detail` or `message`."""
    for key in ("error", "detail", "message"):
        body = cast("dict[str, Any]", body).get(key, body) if isinstance(body, dict) else body
    return body if isinstance(body, str) else ""


def _refusal(response: HostResponse) -> str:
    remedy = "; set executor.token_env to the variable that holds the server's token" if response.status == 401 else ""
    return f"the rollout server refused: {response.message}{remedy}"


def _not_accepted(tried: dict[Host, HostResponse], limit_s: float) -> str:
    reasons = "; ".join(response.message for response in tried.values())
    return f"no rollout server took the rollout within {limit_s:g} s ({reasons}); start more servers, or lower rollout.concurrency"
