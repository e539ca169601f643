"""Which of several addresses serves a request: the one that holds its rollout's prefix, else the least loaded.

An address that fails a few times in a row rests: it gets no requests until it has passed its check, tried again at growing
intervals. Only configured addresses are ever used.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress

from penstock.engines.wire import Fault

FAILURES = 3
"""In a row, before an address rests."""
LONGEST_REST_S = 10.0
REMEMBERED = 65_536
"""Rollouts whose address is known; the longest unused are forgotten first."""

Check = Callable[[str], Awaitable[None]]
"""Asks the server at an address whether it can serve; Fault where it cannot."""


class Address:
    """One server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.load = 0
        """Requests under way from here."""
        self.up = asyncio.Event()
        """Cleared while it rests."""
        self.up.set()
        self.failures = 0
        """In a row."""
        self.trouble = f"{url} has not been well since the start"
        """What was wrong with it last."""
        self.served = 0
        """Requests given to it in all."""

    def __repr__(self) -> str:
        return f"<{self.url}, {'up' if self.up.is_set() else 'resting'}, load {self.load}>"


class Fleet:
    """All addresses. Resting ones are brought back by `check`, in tasks that `close` ends."""

    def __init__(self, urls: Sequence[str], check: Check, *, failures: int = FAILURES, rest_s: float = 0.5) -> None:
        self.addresses = [Address(url) for url in urls]
        self._check = check
        self._failures = failures
        self._rest_s = rest_s
        self._homes: OrderedDict[str, Address] = OrderedDict()
        self._revivals: dict[Address, asyncio.Task[None]] = {}

    @contextmanager
    def lend(self, rollout_id: str, avoid: Collection[Address] = ()) -> Generator[Address]:
        """An address for one request, outside `avoid` where there is another. A fault inside may send it to rest."""
        self._tend()
        address = self._pick(rollout_id, avoid)
        address.load += 1
        address.served += 1
        try:
            yield address
        except Fault as fault:
            self._judge(address, fault)
            raise
        finally:
            address.load -= 1

    def others(self, tried: Collection[Address]) -> bool:
        """Whether some address that is up has not been tried."""
        return any(address.up.is_set() and address not in tried for address in self.addresses)

    async def close(self) -> None:
        """Stop looking after resting addresses."""
        revivals = list(self._revivals.values())
        for task in revivals:
            task.cancel()
        for task in revivals:
            with suppress(asyncio.CancelledError):
                await task

    def _pick(self, rollout_id: str, avoid: Collection[Address]) -> Address:
        up = [address for address in self.addresses if address.up.is_set()]
        if not up:
            troubles = "; ".join(address.trouble for address in self.addresses)
            raise Fault(f"no server is up: {troubles}", kind="broken")
        fresh = [address for address in up if address not in avoid] or up
        home = self._homes.get(rollout_id)
        address = home if home in fresh else min(fresh, key=lambda one: (one.load, one.served))
        if rollout_id:
            self._homes[rollout_id] = address
            self._homes.move_to_end(rollout_id)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return address

    def _judge(self, address: Address, fault: Fault) -> None:
        if fault.kind != "broken":
            return
        address.failures += 1
        address.trouble = str(fault)
        if address.failures >= self._failures:
            address.up.clear()
            self._tend()

    def _tend(self) -> None:
        """See that every resting address is looked after."""
        for address in self.addresses:
            if not address.up.is_set() and address not in self._revivals:
                self._revivals[address] = asyncio.create_task(self._revive(address), name=f"penstock-check-{address.url}")

    async def _revive(self, address: Address) -> None:
        pause_s = self._rest_s
        try:
            while not address.up.is_set():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_REST_S)
                try:
                    await self._check(address.url)
                except Fault as fault:
                    address.trouble = str(fault)
                else:
                    address.failures = 0
                    address.up.set()
        finally:
            del self._revivals[address]
