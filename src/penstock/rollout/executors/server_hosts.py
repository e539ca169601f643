"""Rollout servers as their controller sees them: which one takes a rollout, and what it says of it later."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from urllib.parse import quote

import aiohttp
import orjson

from penstock.engines.retry import backoff_s
from penstock.errors import WorkflowError
from penstock.http.client import retry_after_s
from penstock.rollout.server.protocol import State

CONNECT_S = 5.0
ANSWER_S = 30.0
"""For an answer to a request; a server takes a rollout before it runs it."""
REST_S = 5.0
"""How long a server that cannot be reached is left out while another one can."""
KEEP_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn closes its end."""
CANCEL_S = 5.0
SHORTEST_WAIT_S = 0.05
WORDS = 300
"""Characters of a server's own words that a message quotes."""
NO_RETRY = (401, 403)


class Standing(NamedTuple):
    """What a server says of a rollout."""

    state: State
    words: str
    """How it says that it does not know it, or why it cannot be asked."""


class Answer(NamedTuple):
    status: int
    """0: it never arrived. -1: nobody knows whether it did."""
    words: str
    body: Any = None
    retry_after_s: float = 0.0

    @property
    def is_taken(self) -> bool:
        """The server has the rollout."""
        return 200 <= self.status < 300

    @property
    def is_final(self) -> bool:
        """Asking again, here or elsewhere, would not help."""
        return 300 <= self.status < 500 and self.status != 429

    @property
    def is_free(self) -> bool:
        """The server does not have the rollout: another one may be asked."""
        return self.status in (0, 429, 503)


class Host:
    def __init__(self, url: str) -> None:
        self.url = url
        self.rollouts = 0
        """That it has of ours."""
        self.asked = 0
        """When it was last asked, in requests."""
        self.rests_until = 0.0


class ServerHosts:
    """All of them, on one pool of connections, while the `async with` lasts."""

    def __init__(self, urls: Sequence[str], token: str) -> None:
        self._hosts = [Host(url) for url in urls]
        self._token = token
        self._asked = 0
        self._moved = 0.0
        """When a server last took a rollout or gave one back."""
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
            timeout=aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def ailing(self) -> dict[str, str]:
        """Which servers cannot be used, and why."""
        async with asyncio.TaskGroup() as group:
            asked = {host.url: group.create_task(self._ailment(host)) for host in self._hosts}
        return {url: task.result() for url, task in asked.items() if task.result()}

    async def place(self, body: bytes, rollout_id: str, ended: asyncio.Future[Any], *, patience_s: float) -> Host:
        """Give a rollout to the least busy server that takes it; WorkflowError where none does.

        A busy server is asked again when it says so, others first, until nothing has moved on any for `patience_s`. A server that
        may have taken it, though its answer was lost, is the only one asked from then on: no rollout runs twice. Nothing more is
        asked once `ended` is done.
        """
        began, rounds, tried = time.monotonic(), 0, dict[Host, Answer]()
        bound: Host | None = None
        while True:
            host = bound or self._pick(tried)
            answer = await self._offer(host, body, rollout_id)
            if answer.is_taken or ended.done():
                self._moved = time.monotonic()
                host.rollouts += 1
                return host
            if answer.is_final:
                raise WorkflowError(_refusal(answer))
            tried[host] = answer
            bound = bound if answer.is_free else host
            if bound is None and len(tried) < len(self._hosts):
                continue
            wait_s = max(SHORTEST_WAIT_S, backoff_s(rounds, retry_after_s=min(each.retry_after_s for each in tried.values())))
            if time.monotonic() + wait_s > max(began, self._moved) + patience_s:
                if bound is not None:
                    await self.cancel(bound, rollout_id)
                raise WorkflowError(_nobody(tried, patience_s))
            await asyncio.wait({ended}, timeout=wait_s)
            rounds += 1
            tried.clear()

    def give_back(self, host: Host) -> None:
        """The server has done what it had to do for a rollout."""
        host.rollouts -= 1
        self._moved = time.monotonic()

    async def standing(self, host: Host, rollout_id: str) -> Standing:
        """How far a server is with a rollout."""
        answer = await self._ask(host, "GET", f"/rollout/{quote(rollout_id, safe='')}/status")
        told = cast("dict[str, Any]", answer.body) if answer.is_taken and isinstance(answer.body, dict) else {}
        with suppress(ValueError):
            return Standing(State(told.get("status")), f"{host.url} does not know it")
        return Standing(State.UNKNOWN, answer.words)

    async def cancel(self, host: Host, rollout_id: str) -> None:
        """Ask a server to stop a rollout; one that does not listen will find that nobody wants its result."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self._ask(host, "POST", "/rollout/cancel", orjson.dumps({"ids": [rollout_id]}))

    def _pick(self, tried: dict[Host, Answer]) -> Host:
        now = time.monotonic()
        left = [host for host in self._hosts if host not in tried]
        return min(left, key=lambda host: (host.rests_until > now, host.rollouts, host.asked))

    async def _offer(self, host: Host, body: bytes, rollout_id: str) -> Answer:
        self._asked += 1
        host.asked = self._asked
        try:
            answer = await self._ask(host, "POST", "/rollout", body)
        except asyncio.CancelledError:
            await self.cancel(host, rollout_id)  # it may have arrived
            raise
        host.rests_until = time.monotonic() + REST_S if answer.status <= 0 else 0.0
        return answer

    async def _ailment(self, host: Host) -> str:
        health = await self._ask(host, "GET", "/health")
        if not health.is_taken:
            host.rests_until = time.monotonic() + REST_S
            return health.words
        known = await self._ask(host, "GET", "/rollout/-/status")
        return _refusal(known) if known.status in NO_RETRY else ""

    async def _ask(self, host: Host, method: str, path: str, body: bytes | None = None) -> Answer:
        url = host.url + path
        try:
            async with self._session.request(method, url, data=body, allow_redirects=False) as response:
                text = (await response.content.read(1 << 20)).decode("utf-8", "replace")
                parsed = _json(text)
                said = f"{url} answered {response.status} {response.reason or ''}".rstrip()
                words = self._quote(_message(parsed) or text)
                after_s = retry_after_s(response.headers.get("retry-after"))
                return Answer(response.status, f"{said}{': ' + words if words else ''}", parsed, after_s)
        except aiohttp.ClientConnectorError as cause:
            return Answer(0, f"{url}: {self._quote(str(cause))}")
        except aiohttp.ConnectionTimeoutError:
            return Answer(0, f"{url}: no connection within {CONNECT_S:g} s")
        except TimeoutError:
            return Answer(-1, f"{url} was silent for {ANSWER_S:g} s")
        except (aiohttp.ClientError, OSError) as cause:
            return Answer(-1, f"{url}: {self._quote(str(cause)) or type(cause).__name__}")

    def _quote(self, text: str) -> str:
        """A server's words on one line, without our token, and not too many."""
        line = " ".join((text.replace(self._token, "…") if self._token else text).split())
        return line if len(line) <= WORDS else f"{line[:WORDS]}…"


def _json(text: str) -> Any:
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(text)
    return None


def _message(body: Any) -> str:
    """The sentence in an error's body, in the forms that servers give it."""
    for key in ("error", "detail", "message"):
        body = cast("dict[str, Any]", body).get(key, body) if isinstance(body, dict) else body
    return body if isinstance(body, str) else ""


def _refusal(answer: Answer) -> str:
    remedy = "; set executor.token_env to the variable that holds the server's token" if answer.status == 401 else ""
    return f"the rollout server refused: {answer.words}{remedy}"


def _nobody(tried: dict[Host, Answer], patience_s: float) -> str:
    each = "; ".join(answer.words for answer in tried.values())
    return f"no rollout server took the rollout within {patience_s:g} s ({each}); start more servers, or lower rollout.concurrency"
