"""Rings when any process changes the pool: a thread that listens to PostgreSQL's notifications."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from penstock.pool.bell import Bell

ASIDE_S = 1.0
"""How long to wait before a broken connection is tried again."""


class PostgresBell(Bell):
    """`connect` opens the connection that listens; it is opened anew when it breaks."""

    def __init__(self, connect: Callable[[], "psycopg.Connection[Any]"], channel: str) -> None:
        super().__init__()
        self._connect, self._channel = connect, channel
        self._closed = threading.Event()
        self._connection = connect()
        self._thread = threading.Thread(target=self._run, name="penstock-pool-bell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        with suppress(psycopg.Error), self._connect() as waking:
            waking.execute(f"NOTIFY {self._channel}".encode())
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except psycopg.Error:
                self._closed.wait(ASIDE_S)
                with suppress(psycopg.Error):
                    self._connection = self._connect()
                self.ring()  # what happened meanwhile was not heard
        self._connection.close()

    def _listen(self) -> None:
        self._connection.execute(f"LISTEN {self._channel}".encode())
        while not self._closed.is_set():
            for _ in self._connection.notifies(timeout=TICK_S, stop_after=1):
                self.ring()


TICK_S = 0.5
"""How long closing may have to wait for the thread."""
