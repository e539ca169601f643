"""Requests to a fleet of engines: sent again, there or elsewhere, while no token has come; never after the first one."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from penstock.engines.fleet import FAILURES, Address, Check, Fleet
from penstock.engines.wire import Fault, Reader, Timers, Wire
from penstock.errors import EngineBusy, EngineError

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How much is borne before a caller hears of it."""

    retries: int = 4
    """How often a request that no address would take is sent again after a wait."""
    retry_s: float = 600.0
    """No attempt begins later than this after the first."""
    first_wait_s: float = FIRST_WAIT_S
    """Bound of the first wait; each further one is twice as long."""
    failures: int = FAILURES
    """In a row, before an address rests."""
    rest_s: float = 0.5
    """How long it rests at first."""


class Upstream:
    """A fleet of servers, as one."""

    def __init__(self, urls: Sequence[str], check: Check, *, timers: Timers, patience: Patience, key: str = "") -> None:
        self.wire = Wire(timers, key=key)
        self.fleet = Fleet(urls, check, failures=patience.failures, rest_s=patience.rest_s)
        self.counts: Counter[str] = Counter()
        """What was borne, by its kind: `retried_busy`, `retried_broken`."""
        self._patience = patience
        self._closed = False

    async def stream(
        self, path: str, body: bytes, begin: Callable[[], Reader[T]], *, rollout_id: str = ""
    ) -> AsyncGenerator[T, None]:
        """Post `body` to `path` of some address and give the reply's chunks. `begin` makes the reader of each attempt."""
        trial, begun = Trial(self._patience), False
        while not self._closed:
            try:
                with self.fleet.lend(rollout_id, trial.tried) as address:
                    trial.begin(address)
                    reader = begin()
                    async with aclosing(self.wire.stream(address.url + path, body, reader)) as chunks:
                        async for chunk in chunks:
                            begun = True
                            if reader.done:  # a caller need not read on after this one
                                address.failures = 0
                            yield chunk
                return
            except Fault as fault:
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

    async def close(self) -> None:
        """Fail what is running and let go of all connections."""
        self._closed = True
        await self.fleet.close()
        await self.wire.close()

    def _error(self, fault: Fault, trial: "Trial", rollout_id: str) -> EngineError:
        whose = f"rollout {rollout_id}: " if rollout_id else ""
        often = f"; given up after {trial.attempts} attempts" if trial.attempts > 1 else ""
        if fault.kind == "busy":
            return EngineBusy(f"{whose}{fault}{often}; try again later, or give engine.url more addresses")
        return EngineError(f"{whose}{fault}{often}")


class Trial:
    """The attempts at one request."""

    def __init__(self, patience: Patience) -> None:
        self.attempts = 0
        self.tried: set[Address] = set()
        """Addresses that this round has been to."""
        self._rounds = 0
        self._patience = patience
        self._end = time.monotonic() + patience.retry_s

    def begin(self, address: Address) -> None:
        """Count an attempt."""
        self.attempts += 1
        self.tried.add(address)

    def wait_s(self, fault: Fault, *, others: bool) -> float | None:
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
