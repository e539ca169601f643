"""Which of several addresses serves a request: the one that holds its rollout's prefix, else the least loaded.

Every address is looked at now and then. One that does not pass, or that fails a few times in a row, rests: it gets no requests
until it has passed its check, tried again at growing intervals. While an address takes new weights it gets no requests either, and
those under way are called back first: what was sampled there before carries the version before, whatever is sampled after it the
new one. Only configured addresses are ever used.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from penstock.http.client import CancelHandle, UpstreamError

MAX_FAILURES = 3
"""In a row, before an address rests."""
MAX_RECHECK_S = 10.0
PROBE_EVERY_S = 2.0
"""Less than a server needs to start again: one that did so has been seen missing."""
MAX_STICKY_ROLLOUTS = 65_536
"""Rollouts whose address is known; the longest unused are forgotten first."""


class EngineServer:
    def __init__(self, url: str) -> None:
        self.url = url
        self.version = 0
        """The policy version that it holds; stamped on what it samples."""
        self.leashes: set[CancelHandle] = set()
        """Of the requests under way from here."""
        self.up = asyncio.Event()
        """Cleared while it rests or takes new weights."""
        self.up.set()
        self.switching = False
        """Whether it is taking new weights: worth waiting for."""
        self.lock = asyncio.Lock()
        """Held while it is checked or takes new weights: the two do not mix."""
        self.failures = 0
        """In a row."""
        self.trouble = f"{url} has not been well since the start"
        """What was wrong with it last."""
        self.served = 0
        """Requests given to it in all."""

    @property
    def load(self) -> int:
        """Requests under way from here."""
        return len(self.leashes)

    def call_back(self) -> None:
        """Hang up on what runs there."""
        for leash in self.leashes:
            leash.pull()

    def __repr__(self) -> str:
        return f"<{self.url}, {'up' if self.up.is_set() else 'resting'}, version {self.version}, load {self.load}>"


ServerCheck = Callable[[EngineServer], Awaitable[None]]
"""Asks a server whether it can serve; Fault where it cannot."""


class RoutedRequest(NamedTuple):
    """An address for one request."""

    address: EngineServer
    leash: CancelHandle


class Fleet:
    """All addresses. `probe` is the cheap question to one that serves; `check` the thorough one to one that rests.

    They are asked in tasks that `close` ends.
    """

    def __init__(
        self,
        urls: Sequence[str],
        check: ServerCheck,
        *,
        probe: ServerCheck | None = None,
        failures: int = MAX_FAILURES,
        rest_s: float = 0.5,
        probe_s: float = PROBE_EVERY_S,
    ) -> None:
        self.addresses = [EngineServer(url) for url in urls]
        self._check, self._probe = check, probe
        self._failures = failures
        self._rest_s, self._probe_s = rest_s, probe_s
        self._homes: OrderedDict[str, EngineServer] = OrderedDict()
        self._tasks: dict[EngineServer | None, asyncio.Task[None]] = {}
        """Revivals by their address; under None the one that looks at all of them."""
        self._changed = asyncio.Event()

    async def settled(self) -> None:
        """Wait while no address is up, but one takes new weights; that has a deadline of its own."""
        while not any(one.up.is_set() for one in self.addresses) and any(one.switching for one in self.addresses):
            self._changed.clear()
            await self._changed.wait()

    @contextmanager
    def lend(self, rollout_id: str, avoid: Collection[EngineServer] = ()) -> Generator[RoutedRequest]:
        """An address for one request, outside `avoid` where there is another. A fault inside may send it to rest."""
        self._tend()
        loan = RoutedRequest(self._pick(rollout_id, avoid), CancelHandle())
        loan.address.leashes.add(loan.leash)
        loan.address.served += 1
        try:
            yield loan
        except UpstreamError as fault:
            if not loan.leash.pulled:
                self._judge(loan.address, fault)
            raise
        finally:
            loan.address.leashes.discard(loan.leash)

    def others(self, tried: Collection[EngineServer]) -> bool:
        """Whether some address that is up has not been tried."""
        return any(address.up.is_set() and address not in tried for address in self.addresses)

    async def switch(self, address: EngineServer, version: int, take: Callable[[], Awaitable[None]]) -> None:
        """Call back what runs there, let it take other weights, and use it again as one that holds `version`.

        The Fault of `take` is raised, and the address rests.
        """
        async with address.lock:
            address.up.clear()
            address.call_back()
            address.switching = True
            try:
                await take()
                address.version, address.failures = version, 0
                address.up.set()
            except UpstreamError as fault:
                address.trouble = str(fault)
                raise
            finally:
                address.switching = False
                self._changed.set()
                self._tend()

    async def close(self) -> None:
        """Stop looking after addresses."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    def _pick(self, rollout_id: str, avoid: Collection[EngineServer]) -> EngineServer:
        up = [address for address in self.addresses if address.up.is_set()]
        if not up:
            troubles = "; ".join(address.trouble for address in self.addresses)
            raise UpstreamError(f"no server is up: {troubles}", kind="broken")
        fresh = [address for address in up if address not in avoid] or up
        home = self._homes.get(rollout_id)
        address = home if home in fresh else min(fresh, key=lambda one: (one.load, one.served))
        if rollout_id:
            self._homes[rollout_id] = address
            self._homes.move_to_end(rollout_id)
            if len(self._homes) > MAX_STICKY_ROLLOUTS:
                self._homes.popitem(last=False)
        return address

    def _judge(self, address: EngineServer, fault: UpstreamError) -> None:
        if fault.kind != "broken":
            return
        address.failures += 1
        address.trouble = str(fault)
        if address.failures >= self._failures:
            self._rest(address, fault)

    def _rest(self, address: EngineServer, fault: UpstreamError) -> None:
        """No requests until it has passed its check. Those under way may end: they fail by themselves where they must."""
        address.trouble = str(fault)
        address.up.clear()
        self._tend()

    def _tend(self) -> None:
        """See that every resting address is looked after, and every other one looked at."""
        for address in self.addresses:
            if not address.up.is_set() and not address.switching and address not in self._tasks:
                self._tasks[address] = asyncio.create_task(self._revive(address), name=f"penstock-check-{address.url}")
        if self._probe is not None and None not in self._tasks:
            self._tasks[None] = asyncio.create_task(self._watch(self._probe), name="penstock-probe")

    async def _revive(self, address: EngineServer) -> None:
        pause_s = self._rest_s
        try:
            while not address.up.is_set():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RECHECK_S)
                async with address.lock:
                    if not address.up.is_set():
                        await self._try(address)
        finally:
            del self._tasks[address]

    async def _try(self, address: EngineServer) -> None:
        try:
            await self._check(address)
        except UpstreamError as fault:
            address.trouble = str(fault)
        else:
            address.failures = 0
            address.up.set()
            self._changed.set()

    async def _watch(self, probe: ServerCheck) -> None:
        while True:
            await asyncio.sleep(self._probe_s)
            async with asyncio.TaskGroup() as group:
                for address in self.addresses:
                    if address.up.is_set():
                        group.create_task(self._look(address, probe))
            self._tend()

    async def _look(self, address: EngineServer, probe: ServerCheck) -> None:
        before = address.version
        try:
            await probe(address)
        except UpstreamError as fault:
            if address.up.is_set() and address.version == before:  # it has taken no other weights meanwhile
                self._rest(address, fault)
