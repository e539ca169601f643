"""Delivery of results to whoever asked for a rollout: tried again until it is taken, refused, or too late."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp
from pydantic import ValidationError

from penstock.http.client import retry_after_s
from penstock.rollout.server.protocol import CompletionReply

RETRIED = frozenset((429, 500, 502, 503, 504))
"""Statuses of a listener that may take it later."""
LARGEST_REPLY = 64 << 20
AT_ONCE = 100
"""Connections; further deliveries wait for one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How much is borne before a delivery is given up."""

    attempt_s: float = 10.0
    """For one attempt, from the first byte of the connection to the last of the reply."""
    first_wait_s: float = 0.5
    """Between attempts; doubled each time, up to `longest_wait_s`, unless the listener asks for more."""
    longest_wait_s: float = 8.0
    deadline_s: float = 3600.0
    """From the first attempt to the start of the last."""

    def wait_s(self, failures: int, asked_s: float) -> float:
        """How long to wait after so many failed attempts."""
        return max(asked_s, min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(failures, 30)))


class Delivery(NamedTuple):
    """How a delivery ended."""

    reason: str = ""
    """Why the result was not taken; empty where it was."""
    late: bool = False
    """Whether nobody was there to refuse it: another try may succeed."""
    reply: bytes = b""


class _Retry(Exception):
    """The listener may take it later."""

    def __init__(self, why: str, asked_s: float = 0.0) -> None:
        super().__init__(why)
        self.asked_s = asked_s


class Courier:
    """Sends bodies while the `async with` lasts. It follows no redirect, uses no proxy, keeps no cookie."""

    def __init__(self, patience: Patience | None = None, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._patience = patience or Patience()
        self._sleep = sleep
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._patience.attempt_s),
            connector=aiohttp.TCPConnector(limit=AT_ONCE),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def send(self, url: str, body: bytes, *, key: str | None, what: str) -> Delivery:
        """POST `body` until it is taken. The reason why it was not names `what` and the last answer, never the URL."""
        clock = asyncio.get_running_loop().time
        began, failures = clock(), 0
        while True:
            try:
                return await self._attempt(url, body, key, what)
            except _Retry as error:
                wait_s = self._patience.wait_s(failures, error.asked_s)
                failures += 1
                if clock() + wait_s - began > self._patience.deadline_s:
                    reason = f"{what} was not taken within {self._patience.deadline_s:g} s: {error}"
                    return Delivery(reason, late=True)
                log.info("%s was not taken (%s); again in %g s", what, error, wait_s)
                await self._sleep(wait_s)

    async def _attempt(self, url: str, body: bytes, key: str | None, what: str) -> Delivery:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                if 200 <= response.status < 300:
                    return Delivery(reply=await _read(response, what))
                why = f"the listener answered {response.status}"
                if response.status in RETRIED:
                    raise _Retry(why, retry_after_s(response.headers.get("retry-after")))
                return Delivery(f"{what} was refused: {why}")
        except (aiohttp.ClientError, OSError) as error:
            raise _Retry(f"{type(error).__name__}: {str(error) or 'no answer in time'}") from error


async def _read(response: aiohttp.ClientResponse, what: str) -> bytes:
    reply = b""
    async for piece in response.content.iter_any():
        reply += piece
        if len(reply) > LARGEST_REPLY:
            log.warning("%s was answered with more than %d bytes, which were dropped", what, LARGEST_REPLY)
            response.close()
            return b""
    return reply


def read_reply(reply: bytes, what: str) -> CompletionReply:
    """What a listener answered; where that is something else than the protocol knows, nothing, and a warning."""
    try:
        return CompletionReply.model_validate_json(reply) if reply.strip() else CompletionReply()
    except ValidationError as cause:
        first = cause.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        log.warning("the answer to %s is not used: %s", what, f"{where}: {first['msg']}" if where else first["msg"])
        return CompletionReply()
