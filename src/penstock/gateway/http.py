"""An HTTP/1.1 server for an ASGI app, with as little as possible between the socket and the app."""

import asyncio
import logging
import socket
from types import TracebackType
from typing import Self

from penstock.gateway.connection import Connection, Hub
from penstock.gateway.exchange import App

SWEEP_S = 1.0
"""How often callers are looked after, at most; one timer does it for all, so that a request sets none of its own."""

log = logging.getLogger(__name__)


class HttpServer:
    """Serves `app` on a bound socket while the `async with` lasts; leaving it lets exchanges end for up to `drain_s`.

    A caller who takes nothing of what is ready for it for `reader_s` is cut off.
    """

    def __init__(self, app: App, sock: socket.socket, *, drain_s: float, reader_s: float, backlog: int = 4096) -> None:
        self._sock = sock
        self._drain_s = drain_s
        self._sweep_s = min(SWEEP_S, reader_s / 4)
        self._backlog = backlog
        self._hub = Hub(app, reader_s)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)
        self._listener = await self._loop.create_server(self._connection, sock=self._sock, backlog=self._backlog)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hub.draining = True
        self._listener.close()
        for connection in tuple(self._hub.connections):
            connection.drain()
        try:
            async with asyncio.timeout(self._drain_s):
                await self._until_over()
        except TimeoutError:
            log.warning("%d calls did not end within %g s of the server's stop and are cut", len(self._hub.tasks), self._drain_s)
        finally:
            await self._cut()
            self._timer.cancel()

    def _connection(self) -> Connection:
        return Connection(self._hub, self._loop)

    def _sweep(self) -> None:
        self._hub.now += self._sweep_s
        for connection in tuple(self._hub.connections):
            connection.check(self._hub.now)
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)

    async def _until_over(self) -> None:
        self._hub.left()
        await self._hub.over.wait()

    async def _cut(self) -> None:
        """Without a deadline: a task that is cancelled may still use what is closed after the server."""
        while tasks := tuple(self._hub.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for connection in tuple(self._hub.connections):
            connection.transport.abort()
        await self._until_over()
        await self._listener.wait_closed()
