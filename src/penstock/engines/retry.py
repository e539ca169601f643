"""Requests to a fleet of servers. A request is sent again, there or to another server, until its first token has come."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.engines.fleet import MAX_FAILURES, PROBE_EVERY_S, EngineServer, Fleet, RoutedRequest, ServerCheck
from penstock.errors import EngineBusy, EngineError, EngineRefused
from penstock.http.client import EventReader, HttpClient, RequestTimeouts, UpstreamError

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """What is tolerated before a caller sees an error."""

    retries: int = 4
    """How often a request that no server would take is sent again after a wait."""
    retry_s: float = 600.0
    """No attempt begins later than this after the first."""
    first_wait_s: float = FIRST_WAIT_S
    """Upper bound of the first wait; it doubles with each further one."""
    failures: int = MAX_FAILURES
    """Failures in a row after which a server is down."""
    recheck_s: float = 0.5
    """How long a server is down before its first check."""
    probe_s: float = PROBE_EVERY_S
    """Time between two probes of a server that is up."""
    down_s: float = 0.0
    """How long a request waits while no server is up, before it counts as an attempt."""


class RetryState:
    """The attempts at one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.attempts = 0
        self.tried: set[EngineServer] = set()
        """Servers tried since the last wait."""
        self._rounds = 0
        self._policy = policy
        self._deadline = time.monotonic() + policy.retry_s

    def begin(self, server: EngineServer) -> None:
        self.attempts += 1
        self.tried.add(server)

    def wait_s(self, error: UpstreamError, *, others: bool) -> float | None:
        """How long to wait before the next attempt: 0 if there are other servers to try; None to give up."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0.0:
            return None
        if others:
            return 0.0
        if self._rounds == self._policy.retries:
            return None
        wait_s = backoff_s(self._rounds, first_s=self._policy.first_wait_s, retry_after_s=error.retry_after_s)
        self._rounds += 1
        self.tried.clear()
        return wait_s if wait_s < left_s else None


def backoff_s(rounds: int, *, first_s: float = FIRST_WAIT_S, retry_after_s: float = 0.0) -> float:
    """Exponential backoff with full jitter, added to what the server asked for."""
    return retry_after_s + random.uniform(0.0, min(LONGEST_WAIT_S, first_s * 2.0**rounds))


class ServerRequest(NamedTuple, Generic[T]):
    """One attempt at a request."""

    body: bytes
    reader: EventReader[T]
    key: str
    """The server's id for it, where it takes one."""


AbortRequest = Callable[[str, str], Coroutine[Any, Any, None]]
"""Called with a URL and a request key: asks that server to stop generating."""


class FleetClient:
    """Streams replies from whichever server of a fleet answers."""

    def __init__(
        self,
        urls: Sequence[str],
        check: ServerCheck,
        *,
        probe: ServerCheck | None = None,
        abort: AbortRequest | None = None,
        timeouts: RequestTimeouts,
        policy: RetryPolicy,
        key: str = "",
    ) -> None:
        self.http = HttpClient(timeouts, key=key)
        self.fleet = Fleet(urls, check, probe=probe, failures=policy.failures, recheck_s=policy.recheck_s, probe_s=policy.probe_s)
        self.counts: Counter[str] = Counter()
        """Events by kind: `retried_busy`, `retried_broken`; `waited_down` waited for a server to come back; `cut_over` is a reply
        interrupted for new weights."""
        self.policy = policy
        self._abort = abort
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = False

    async def stream(
        self, path: str, prepare: Callable[[EngineServer], ServerRequest[T]], *, rollout_id: str = "", missing: str = ""
    ) -> AsyncGenerator[T, None]:
        """POST what `prepare` makes for a server to `path` there, and yield the reply's chunks.

        A server that refuses because it does not know `missing` was restarted: the request is sent again once it does.
        It ends early and without an error if the server loads other weights; the caller then requests the rest of the reply.
        """
        state, begun, server = RetryState(self.policy), False, None
        while not self._closed:
            await self.fleet.wait_for_switch()
            await self.wait_for_server()
            try:
                with self.fleet.route(rollout_id, state.tried) as routed:
                    server = routed.server
                    state.begin(server)
                    request = prepare(routed.server)
                    async with aclosing(self._read(routed, path, request)) as chunks:
                        async for chunk in chunks:
                            begun = True
                            if request.reader.done:  # before the yield: a caller need not read on after the last chunk
                                routed.server.failures = 0
                            yield chunk
                return
            except UpstreamError as error:
                if self._closed:
                    break
                if server is not None and missing and missing in str(error):
                    self.fleet.put_down(server, error)
                elif begun or error.kind in ("refused", "garbled"):
                    raise self._engine_error(error, state, rollout_id) from error
                wait_s = state.wait_s(error, others=self.fleet.has_untried(state.tried))
                if wait_s is None:
                    raise self._engine_error(error, state, rollout_id) from error
                self.counts[f"retried_{error.kind}"] += 1
                await asyncio.sleep(wait_s)
        raise EngineError("the engine is closed")

    async def wait_for_server(self) -> None:
        """Wait while all servers are down, such as during the restart of the only one, for `down_s` at most."""
        if self.policy.down_s and not self.fleet.is_up():
            self.counts["waited_down"] += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self.policy.down_s):
                    await self.fleet.wait_until_up()

    async def close(self) -> None:
        """Fail what is running and close all connections."""
        self._closed = True
        for server in self.fleet.servers:
            server.cancel_requests()
        for task in list(self._aborts):
            task.cancel()
        await self.fleet.close()
        await self.http.close()

    async def _read(self, routed: RoutedRequest, path: str, request: ServerRequest[T]) -> AsyncGenerator[T, None]:
        """Yield the chunks of one attempt, up to where it is cancelled."""
        (server, handle), reader = routed, request.reader
        try:
            async with aclosing(self.http.stream(server.url + path, request.body, reader, handle)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    if handle.cancelled:
                        break
        except UpstreamError:
            if not handle.cancelled:
                raise
        finally:
            if not reader.done:
                if handle.cancelled:
                    self.counts["cut_over"] += 1
                self._start_abort(server.url, request.key)

    def _start_abort(self, url: str, key: str) -> None:
        """Notify the server in a separate task: this runs while a generator closes, perhaps because its task was cancelled."""
        if self._abort is None or self._closed:
            return
        task = asyncio.create_task(self._send_abort(self._abort, url, key), name=f"penstock-leave-{key}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, abort: AbortRequest, url: str, key: str) -> None:
        with suppress(UpstreamError):  # the server is gone, and the request with it
            await abort(url, key)

    def _engine_error(self, error: UpstreamError, state: RetryState, rollout_id: str) -> EngineError:
        where = f"rollout {rollout_id}: " if rollout_id else ""
        attempts = f"; given up after {state.attempts} attempts" if state.attempts > 1 else ""
        if error.kind == "busy":
            text = f"{where}{error}{attempts}; try again later, or give engine.url more addresses"
            return EngineBusy(text, status=429 if error.status == 429 else 503, retry_after_s=error.retry_after_s)
        if error.kind == "refused":
            return EngineRefused(f"{where}{error}{attempts}")
        return EngineError(f"{where}{error}{attempts}")
