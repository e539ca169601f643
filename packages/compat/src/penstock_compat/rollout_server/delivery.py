"""Delivers results to a controller's callback URLs, with retries until they are accepted or refused, or a deadline passes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp
from pydantic import ValidationError

from penstock.http.client import retry_after_s
from penstock_compat.rollout_server.protocol import CompletionReply

RETRY_STATUSES = frozenset((429, 500, 502, 503, 504))
"""Statuses after which the delivery is tried again."""
MAX_REPLY_BYTES = 64 << 20
MAX_CONNECTIONS = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPolicy:
    """When a delivery is tried again, and when it is given up."""

    attempt_s: float = 10.0
    """The time for one attempt, from connecting to the end of the reply."""
    first_wait_s: float = 0.5
    """Between attempts; doubled each time up to `longest_wait_s`, unless Retry-After asks for more."""
    longest_wait_s: float = 8.0
    deadline_s: float = 3600.0
    """From the start of the first attempt to the start of the last."""

    def wait_s(self, failures: int, retry_after_s: float) -> float:
        """Returns how long to wait after `failures` failed attempts."""
        return max(retry_after_s, min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(failures, 30)))


class DeliveryResult(NamedTuple):
    """How a delivery ended."""

    reason: str = ""
    """Why the result was not accepted; empty if it was."""
    gave_up: bool = False
    """Whether the deadline passed without a refusal: a later delivery may succeed."""
    reply: bytes = b""


class _Retry(Exception):
    """The attempt failed and may succeed later."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class CallbackSender:
    """Sends callbacks while the `async with` lasts. It follows no redirects, uses no proxy and keeps no cookies."""

    def __init__(
        self, policy: DeliveryPolicy | None = None, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self._policy = policy or DeliveryPolicy()
        self._sleep = sleep
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._policy.attempt_s),
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def send(self, url: str, body: bytes, *, key: str | None, what: str) -> DeliveryResult:
        """POSTs `body` until it is accepted or refused. Messages call it `what`; they never hold the URL, which may be secret."""
        clock = asyncio.get_running_loop().time
        started, failures = clock(), 0
        while True:
            try:
                return await self._attempt(url, body, key, what)
            except _Retry as error:
                wait_s = self._policy.wait_s(failures, error.after_s)
                failures += 1
                if clock() + wait_s - started > self._policy.deadline_s:
                    reason = f"{what} was not taken within {self._policy.deadline_s:g} s: {error}"
                    return DeliveryResult(reason, gave_up=True)
                log.info("%s was not taken (%s); again in %g s", what, error, wait_s)
                await self._sleep(wait_s)

    async def _attempt(self, url: str, body: bytes, key: str | None, what: str) -> DeliveryResult:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                if 200 <= response.status < 300:
                    return DeliveryResult(reply=await _read(response, what))
                why = f"the listener answered {response.status}"
                if response.status in RETRY_STATUSES:
                    raise _Retry(why, retry_after_s(response.headers.get("retry-after")))
                return DeliveryResult(f"{what} was refused: {why}")
        except (aiohttp.ClientError, OSError) as error:
            raise _Retry(f"{type(error).__name__}: {str(error) or 'no answer in time'}") from error


async def _read(response: aiohttp.ClientResponse, what: str) -> bytes:
    reply = b""
    async for piece in response.content.iter_any():
        reply += piece
        if len(reply) > MAX_REPLY_BYTES:
            log.warning("%s was answered with more than %d bytes, which were dropped", what, MAX_REPLY_BYTES)
            response.close()
            return b""
    return reply


def read_reply(reply: bytes, what: str) -> CompletionReply:
    """Parses the reply to a completion. An invalid one counts as empty, with a warning."""
    try:
        return CompletionReply.model_validate_json(reply) if reply.strip() else CompletionReply()
    except ValidationError as cause:
        first = cause.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        log.warning("the answer to %s is not used: %s", what, f"{where}: {first['msg']}" if where else first["msg"])
        return CompletionReply()
