"""The writer process, which writes for several: `python -m penstock.pool.writer_process`, started by `open_writer_process`.

Processes that share a SQLite file wait for each other's commits, and each has other threads that want the interpreter. This one
only writes: what waits when it is free becomes one transaction, whichever client sent it. It reads its settings, the pool's folder
and the socket to listen on, from stdin, and says on stdout that it listens or why it cannot. It ends once stdin is closed and the
last client is gone.
"""

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.errors import PenstockError
from penstock.pool.sql.sqlite import FAULTS, explain, open_database
from penstock.pool.writer import MAX_BATCH, BatchWriter, PendingWrite
from penstock.pool.writer_protocol import RequestDecoder, encode_answers
from penstock.system.processes import relax_gc, write_answer

DRAIN_S = 20.0
"""How long clients may go on after the starter is gone: they cancel their rollouts and record that."""
RECEIVE_BYTES = 1 << 20
"""Taken from one client before the next has its turn."""
SEND_TIMEOUT_S = 5.0
"""For a client to take its answers, which are short."""


class WriterSettings(NamedTuple):
    folder: str
    socket: str


@dataclass(slots=True, eq=False, kw_only=True)
class _ClientWrite(PendingWrite):
    client: "_Client"
    number: int


class _Client:
    """A process that sends writes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_TIMEOUT_S)
        self.connection = connection
        self._decoder = RequestDecoder()

    def receive(self) -> list[_ClientWrite] | None:
        """Return the writes that arrived; None once the client is gone."""
        try:
            received = self.connection.recv(RECEIVE_BYTES)
        except OSError:
            return None
        if not received:
            return None
        requests = self._decoder.feed(received)
        return [_ClientWrite(operation=operation, value=value, client=self, number=number) for number, operation, value in requests]

    def answer(self, writes: list[_ClientWrite]) -> None:
        """Send the outcomes. A client that is gone or stuck is disconnected."""
        try:
            self.connection.sendall(encode_answers([(write.number, write) for write in writes]))
        except OSError:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


class WriterProcess:
    """Serves until no client is left."""

    def __init__(self, listener: socket.socket, writer: BatchWriter) -> None:
        self._listener, self._writer = listener, writer
        self._queue: list[_ClientWrite] = []
        self._clients: set[_Client] = set()
        self._deadline: float | None = None
        """When it ends at the latest; None as long as its starter lives."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self, starter_pipe: int) -> None:
        """Write until `starter_pipe` is closed and all clients are gone."""
        self._selector.register(starter_pipe, selectors.EVENT_READ, partial(self._check_starter, starter_pipe))
        with closing(self._selector):
            while self._deadline is None or (self._clients and time.monotonic() < self._deadline):
                timeout = None if self._deadline is None else self._deadline - time.monotonic()
                for key, _ in self._selector.select(0 if self._queue else timeout):
                    callback: Callable[[], None] = key.data
                    callback()
                self._write_batch()

    def _check_starter(self, starter_pipe: int) -> None:
        if not os.read(starter_pipe, 4096):
            self._deadline = time.monotonic() + DRAIN_S
            self._selector.unregister(starter_pipe)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._receive, client))

    def _receive(self, client: _Client) -> None:
        received = client.receive()
        if received is not None:
            self._queue += received
            return
        self._clients.remove(client)
        self._selector.unregister(client.connection)
        client.connection.close()

    def _write_batch(self) -> None:
        batch, self._queue = self._queue[:MAX_BATCH], self._queue[MAX_BATCH:]
        if not batch:
            return
        self._writer.commit(batch)
        for client in {write.client: None for write in batch}:
            client.answer([write for write in batch if write.client is client])


def main() -> int:
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: the rest of the pipe is left to `serve`
        line = stdin.readline()
    if not line:  # the starter was killed before it sent the settings
        return 1
    settings = WriterSettings(**orjson.loads(line))
    address, path = Path(settings.socket), Path(settings.folder) / "pool.db"
    try:
        database = open_database(path)
    except FAULTS as cause:
        return _report(1, error=str(explain(cause, path)))
    except PenstockError as error:
        return _report(1, error=str(error))
    with closing(BatchWriter(database, partial(explain, path=path))) as writer, socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(settings.socket)
            listener.listen()
        except OSError as cause:
            return _report(1, error=f"{settings.socket}: cannot listen there ({cause}); set TMPDIR to a folder with a short path")
        try:
            _report(0, ready=True)
            WriterProcess(listener, writer).serve(0)
        finally:
            address.unlink(missing_ok=True)
            with suppress(OSError):
                address.parent.rmdir()
    return 0


def _report(code: int, **line: Any) -> int:
    """Write a line of JSON to stdout; returns `code`."""
    write_answer(**line)
    return code


if __name__ == "__main__":
    relax_gc()
    sys.exit(main())
