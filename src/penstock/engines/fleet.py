"""Fleet of engine servers: which one serves a request, and which ones are up.

A request goes to the server that holds its rollout's prefix in its cache, else to the least loaded one. Every server is probed
now and then. One that fails its probe, or fails several requests in a row, is down: it gets no requests until it passes a
thorough check, repeated at growing intervals. A server that loads new weights gets no requests either, and its running requests
are cancelled first: tokens sampled before carry the old version, tokens sampled after it the new one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from penstock.http.client import CancelHandle, UpstreamError

MAX_FAILURES = 3
"""Failures in a row after which a server is down."""
MAX_RECHECK_S = 10.0
PROBE_EVERY_S = 2.0
"""Shorter than a server needs to restart, so that no restart, which loses the loaded weights, goes unnoticed."""
MAX_STICKY_ROLLOUTS = 65_536
"""Rollouts whose server is remembered; the least recently used are forgotten first."""


class EngineServer:
    def __init__(self, url: str) -> None:
        self.url = url
        self.version = 0
        """The policy version that it holds; recorded with the tokens that it samples."""
        self.running: set[CancelHandle] = set()
        """Requests from this process that it is serving."""
        self.up = asyncio.Event()
        """Cleared while it is down or loads new weights."""
        self.up.set()
        self.switching = False
        """Whether it is loading new weights, so that callers wait for it."""
        self.lock = asyncio.Lock()
        """Held during a check and while it loads weights, so that the two never overlap."""
        self.failures = 0
        """Failures in a row."""
        self.last_error = f"{url} has not been well since the start"
        self.served = 0
        """Requests sent to it in all."""

    @property
    def load(self) -> int:
        return len(self.running)

    def cancel_requests(self) -> None:
        for handle in self.running:
            handle.cancel()

    def __repr__(self) -> str:
        return f"<{self.url}, {'up' if self.up.is_set() else 'resting'}, version {self.version}, load {self.load}>"


ServerCheck = Callable[[EngineServer], Awaitable[None]]
"""Asks a server whether it can serve; UpstreamError if it cannot."""


class RoutedRequest(NamedTuple):
    server: EngineServer
    handle: CancelHandle


class Fleet:
    """All servers of an engine. `probe` is the cheap question to a server that is up, `check` the thorough one to one that is down.

    Both run in separate tasks, which `close` cancels.
    """

    def __init__(
        self,
        urls: Sequence[str],
        check: ServerCheck,
        *,
        probe: ServerCheck | None = None,
        failures: int = MAX_FAILURES,
        recheck_s: float = 0.5,
        probe_s: float = PROBE_EVERY_S,
    ) -> None:
        self.servers = [EngineServer(url) for url in urls]
        self._check, self._probe = check, probe
        self._failures = failures
        self._recheck_s, self._probe_s = recheck_s, probe_s
        self._sticky: OrderedDict[str, EngineServer] = OrderedDict()
        """The server of each rollout, least recently used first."""
        self._tasks: dict[EngineServer | None, asyncio.Task[None]] = {}
        """Recheck tasks by server; under None the task that probes all of them."""
        self._changed = asyncio.Event()
        self._closed = False

    async def wait_for_switch(self) -> None:
        """Wait while no server is up but one is loading weights. Loading has its own deadline."""
        while not self.is_up() and any(server.switching for server in self.servers):
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_up(self) -> None:
        """Wait until a server is up. Those that are down are checked again and again."""
        self._start_tasks()
        while not self.is_up() and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    def is_up(self) -> bool:
        """Whether any server is up."""
        return any(server.up.is_set() for server in self.servers)

    @contextmanager
    def route(self, rollout_id: str, avoid: Collection[EngineServer] = ()) -> Generator[RoutedRequest]:
        """Choose a server for one request, outside `avoid` if possible. An UpstreamError inside counts against the server."""
        self._start_tasks()
        request = RoutedRequest(self._choose(rollout_id, avoid), CancelHandle())
        server, handle = request
        server.running.add(handle)
        server.served += 1
        try:
            yield request
        except UpstreamError as error:
            if not handle.cancelled:
                self._count_failure(server, error)
            raise
        finally:
            server.running.discard(handle)

    def has_untried(self, tried: Collection[EngineServer]) -> bool:
        """Whether some server that is up has not been tried."""
        return any(server.up.is_set() and server not in tried for server in self.servers)

    async def switch(self, server: EngineServer, version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Cancel what runs on a server, let it `load` other weights, and use it again with `version`.

        If `load` raises UpstreamError, it is raised again and the server is down.
        """
        async with server.lock:
            server.up.clear()
            server.cancel_requests()
            server.switching = True
            try:
                await load()
                server.version, server.failures = version, 0
                server.up.set()
            except UpstreamError as error:
                server.last_error = str(error)
                raise
            finally:
                server.switching = False
                self._changed.set()
                self._start_tasks()

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    def _choose(self, rollout_id: str, avoid: Collection[EngineServer]) -> EngineServer:
        up = [server for server in self.servers if server.up.is_set()]
        if not up:
            raise UpstreamError(f"no server is up: {'; '.join(server.last_error for server in self.servers)}", kind="broken")
        fresh = [server for server in up if server not in avoid] or up
        sticky = self._sticky.get(rollout_id)
        # `served` breaks ties, so that idle servers take turns.
        chosen = sticky if sticky in fresh else min(fresh, key=lambda server: (server.load, server.served))
        if rollout_id:
            self._sticky[rollout_id] = chosen
            self._sticky.move_to_end(rollout_id)
            if len(self._sticky) > MAX_STICKY_ROLLOUTS:
                self._sticky.popitem(last=False)
        return chosen

    def _count_failure(self, server: EngineServer, error: UpstreamError) -> None:
        if error.kind != "broken":
            return
        server.failures += 1
        server.last_error = str(error)
        if server.failures >= self._failures:
            self.put_down(server, error)

    def put_down(self, server: EngineServer, error: UpstreamError) -> None:
        """Send no requests until the server passes its check. Running ones are left alone: they may still succeed."""
        server.last_error = str(error)
        server.up.clear()
        self._start_tasks()

    def _start_tasks(self) -> None:
        """Start a recheck task for every server that is down, and the probe task."""
        if self._closed:
            return
        for server in self.servers:
            if not server.up.is_set() and not server.switching and server not in self._tasks:
                self._tasks[server] = asyncio.create_task(self._recheck_until_up(server), name=f"penstock-check-{server.url}")
        if self._probe is not None and None not in self._tasks:
            self._tasks[None] = asyncio.create_task(self._probe_all(self._probe), name="penstock-probe")

    async def _recheck_until_up(self, server: EngineServer) -> None:
        pause_s = self._recheck_s
        try:
            while not server.up.is_set():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RECHECK_S)
                async with server.lock:
                    if not server.up.is_set():
                        await self._recheck(server)
        finally:
            del self._tasks[server]

    async def _recheck(self, server: EngineServer) -> None:
        try:
            await self._check(server)
        except UpstreamError as error:
            server.last_error = str(error)
        else:
            server.failures = 0
            server.up.set()
            self._changed.set()

    async def _probe_all(self, probe: ServerCheck) -> None:
        while True:
            await asyncio.sleep(self._probe_s)
            async with asyncio.TaskGroup() as group:
                for server in self.servers:
                    if server.up.is_set():
                        group.create_task(self._probe_server(server, probe))
            self._start_tasks()

    async def _probe_server(self, server: EngineServer, probe: ServerCheck) -> None:
        before = server.version
        try:
            await probe(server)
        except UpstreamError as error:
            if server.up.is_set() and server.version == before:  # else the answer is about weights that it no longer holds
                self.put_down(server, error)
