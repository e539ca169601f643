"""Requests to a fleet of engines: sent again, there or elsewhere, while no token has come; never after the first one."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.engines.fleet import MAX_FAILURES, PROBE_EVERY_S, EngineServer, Fleet, RoutedRequest, ServerCheck
from penstock.errors import EngineBusy, EngineError
from penstock.http.client import EventReader, HttpClient, RequestTimeouts, UpstreamError

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How much is borne before a caller hears of it."""

    retries: int = 4
    """How often a request that no address would take is sent again after a wait."""
    retry_s: float = 600.0
    """No attempt begins later than this after the first."""
    first_wait_s: float = FIRST_WAIT_S
    """Bound of the first wait; each further one is twice as long."""
    failures: int = MAX_FAILURES
    """In a row, before an address rests."""
    rest_s: float = 0.5
    """How long it rests at first."""
    probe_s: float = PROBE_EVERY_S
    """Between two looks at an address that serves."""


class ServerRequest(NamedTuple, Generic[T]):
    """One try at a request."""

    body: bytes
    reader: EventReader[T]
    key: str
    """What the server may know it by."""


AbortRequest = Callable[[str, str], Coroutine[Any, Any, None]]
"""Tells the server at a URL that nobody reads the reply to the attempt of a key any more."""


class FleetClient:
    """A fleet of servers, as one."""

    def __init__(
        self,
        urls: Sequence[str],
        check: ServerCheck,
        *,
        probe: ServerCheck | None = None,
        leave: AbortRequest | None = None,
        timers: RequestTimeouts,
        patience: RetryPolicy,
        key: str = "",
    ) -> None:
        self.wire = HttpClient(timers, key=key)
        self.fleet = Fleet(urls, check, probe=probe, failures=patience.failures, rest_s=patience.rest_s, probe_s=patience.probe_s)
        self.counts: Counter[str] = Counter()
        """What was borne, by its kind: `retried_busy`, `retried_broken`; `cut_over`: interrupted for new weights."""
        self._patience = patience
        self._leave = leave
        self._farewells: set[asyncio.Task[None]] = set()
        self._closed = False

    async def stream(
        self, path: str, begin: Callable[[EngineServer], ServerRequest[T]], *, rollout_id: str = ""
    ) -> AsyncGenerator[T, None]:
        """Post what `begin` makes of an address to `path` there, and give the reply's chunks.

        It ends early, without a fault, where the address takes other weights: the caller then asks for the rest of the reply.
        """
        trial, begun = RetryState(self._patience), False
        while not self._closed:
            await self.fleet.settled()
            try:
                with self.fleet.lend(rollout_id, trial.tried) as loan:
                    trial.begin(loan.address)
                    attempt = begin(loan.address)
                    async with aclosing(self._read(loan, path, attempt)) as chunks:
                        async for chunk in chunks:
                            begun = True
                            if attempt.reader.done:  # a caller need not read on after this one
                                loan.address.failures = 0
                            yield chunk
                return
            except UpstreamError as fault:
                if self._closed:
                    break
                if begun or fault.kind in ("refused", "garbled"):
                    raise self._error(fault, trial, rollout_id) from fault
                wait_s = trial.wait_s(fault, others=self.fleet.others(trial.tried))
                if wait_s is None:
                    raise self._error(fault, trial, rollout_id) from fault
                self.counts[f"retried_{fault.kind}"] += 1
                await asyncio.sleep(wait_s)
        raise EngineError("the engine is closed")

    async def _read(self, loan: RoutedRequest, path: str, attempt: ServerRequest[T]) -> AsyncGenerator[T, None]:
        """The chunks of one attempt, up to where it is called back."""
        try:
            async with aclosing(self.wire.stream(loan.address.url + path, attempt.body, attempt.reader, loan.leash)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    if loan.leash.pulled:
                        break
        except UpstreamError:
            if not loan.leash.pulled:
                raise
        finally:
            if not attempt.reader.done:
                if loan.leash.pulled:
                    self.counts["cut_over"] += 1
                self._say_farewell(loan.address.url, attempt.key)

    def _say_farewell(self, url: str, key: str) -> None:
        if self._leave is None or self._closed:
            return
        task = asyncio.create_task(self._bid(self._leave, url, key), name=f"penstock-leave-{key}")
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _bid(self, leave: AbortRequest, url: str, key: str) -> None:
        with suppress(UpstreamError):  # the server is gone, and the request with it
            await leave(url, key)

    async def close(self) -> None:
        """Fail what is running and let go of all connections."""
        self._closed = True
        for address in self.fleet.addresses:
            address.call_back()
        for task in list(self._farewells):
            task.cancel()
        await self.fleet.close()
        await self.wire.close()

    def _error(self, fault: UpstreamError, trial: "RetryState", rollout_id: str) -> EngineError:
        whose = f"rollout {rollout_id}: " if rollout_id else ""
        often = f"; given up after {trial.attempts} attempts" if trial.attempts > 1 else ""
        if fault.kind == "busy":
            return EngineBusy(f"{whose}{fault}{often}; try again later, or give engine.url more addresses")
        return EngineError(f"{whose}{fault}{often}")


class RetryState:
    """The attempts at one request."""

    def __init__(self, patience: RetryPolicy) -> None:
        self.attempts = 0
        self.tried: set[EngineServer] = set()
        """Addresses that this round has been to."""
        self._rounds = 0
        self._patience = patience
        self._end = time.monotonic() + patience.retry_s

    def begin(self, address: EngineServer) -> None:
        self.attempts += 1
        self.tried.add(address)

    def wait_s(self, fault: UpstreamError, *, others: bool) -> float | None:
        """How long to wait before the next attempt, 0 where another address is left; None where enough was tried."""
        left_s = self._end - time.monotonic()
        if left_s <= 0.0:
            return None
        if others:
            return 0.0
        if self._rounds == self._patience.retries:
            return None
        wait_s = backoff_s(self._rounds, first_s=self._patience.first_wait_s, retry_after_s=fault.retry_after_s)
        self._rounds += 1
        self.tried.clear()
        return wait_s if wait_s < left_s else None


def backoff_s(rounds: int, *, first_s: float = FIRST_WAIT_S, retry_after_s: float = 0.0) -> float:
    """Anything up to a bound that doubles with every round, so that callers spread; on top of what the server asked for."""
    return retry_after_s + random.uniform(0.0, min(LONGEST_WAIT_S, first_s * 2.0**rounds))
