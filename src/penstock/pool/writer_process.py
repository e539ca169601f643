"""One process that writes for several: `python -m penstock.pool.writer_process`, started by `open_scribe`.

Processes that share a SQLite file wait for each other's commits, and each has other threads that want the interpreter. This one
does nothing but write: what waits when it is free becomes one transaction, whoever sent it. By stdin it is told the pool's folder
and where to listen; by stdout it says that it does, or why it cannot. It ends once stdin has ended and its last sender is gone.
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
from penstock.pool.sqlite_file import FAULTS, explain, open_database
from penstock.pool.writer import TOGETHER, Committer, Job
from penstock.pool.writer_protocol import WriteRequests, write_answers
from penstock.system.processes import relax_gc, write_answer

OUTLIVES_S = 20.0
"""How long senders may go on once the one who started this is gone: they undo what they run."""
RECEIVED = 1 << 20
"""Bytes that are taken from one sender before the next has its turn."""
SENT_S = 5.0
"""For a sender to take its answers, which are short; one that does not is given up."""


class WriterSettings(NamedTuple):
    """What it is told."""

    folder: str
    socket: str


@dataclass(slots=True, eq=False, kw_only=True)
class _Sent(Job):
    sender: "_Sender"
    number: int


class _Sender:
    """A process that sends writes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SENT_S)
        self.connection = connection
        self._letters = WriteRequests()

    def receive(self) -> list[_Sent] | None:
        """What came; None once it is gone."""
        try:
            received = self.connection.recv(RECEIVED)
        except OSError:
            return None
        if not received:
            return None
        letters = self._letters.read(received)
        return [_Sent(bulk=bulk, value=value, sender=self, number=number) for number, bulk, value in letters]

    def answer(self, jobs: list[_Sent]) -> None:
        """Say what came of them; one that is gone or stuck is heard of no more."""
        try:
            self.connection.sendall(write_answers([(job.number, job) for job in jobs]))
        except OSError:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


class WriterProcess:
    """Serves until nobody is left to write for."""

    def __init__(self, listener: socket.socket, committer: Committer) -> None:
        self._listener, self._committer = listener, committer
        self._waiting: list[_Sent] = []
        self._senders: set[_Sender] = set()
        self._until: float | None = None
        """When it ends at the latest; None as long as its starter lives."""
        self._ready = selectors.DefaultSelector()
        self._ready.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self, orders: int) -> None:
        """Write until `orders`, a pipe of whoever started this, has ended and all senders are gone."""
        self._ready.register(orders, selectors.EVENT_READ, partial(self._look, orders))
        with closing(self._ready):
            while self._until is None or (self._senders and time.monotonic() < self._until):
                timeout = None if self._until is None else self._until - time.monotonic()
                for key, _ in self._ready.select(0 if self._waiting else timeout):
                    take: Callable[[], None] = key.data
                    take()
                self._write()

    def _look(self, orders: int) -> None:
        if not os.read(orders, 4096):
            self._until = time.monotonic() + OUTLIVES_S
            self._ready.unregister(orders)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        sender = _Sender(connection)
        self._senders.add(sender)
        self._ready.register(connection, selectors.EVENT_READ, partial(self._receive, sender))

    def _receive(self, sender: _Sender) -> None:
        received = sender.receive()
        if received is not None:
            self._waiting += received
            return
        self._senders.remove(sender)
        self._ready.unregister(sender.connection)
        sender.connection.close()

    def _write(self) -> None:
        """One batch of what waits."""
        batch, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
        if not batch:
            return
        self._committer.commit(batch)
        for sender in {job.sender: None for job in batch}:
            sender.answer([job for job in batch if job.sender is sender])


def main() -> int:
    """Read the orders, listen, serve."""
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()
    if not line:  # whoever started this was killed before it could say anything
        return 1
    given = WriterSettings(**orjson.loads(line))
    where, path = Path(given.socket), Path(given.folder) / "pool.db"
    try:
        database = open_database(path)
    except FAULTS as cause:
        return _say(1, error=str(explain(cause, path)))
    except PenstockError as error:
        return _say(1, error=str(error))
    with closing(Committer(database, partial(explain, path=path))) as committer, socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(given.socket)
            listener.listen()
        except OSError as cause:
            return _say(1, error=f"{given.socket}: cannot listen there ({cause}); set TMPDIR to a folder with a short path")
        try:
            _say(0, ready=True)
            WriterProcess(listener, committer).serve(0)
        finally:
            where.unlink(missing_ok=True)
            with suppress(OSError):
                where.parent.rmdir()
    return 0


def _say(code: int, **line: Any) -> int:
    write_answer(**line)
    return code


if __name__ == "__main__":
    relax_gc()
    sys.exit(main())
