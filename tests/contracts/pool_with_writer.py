"""A SQLite pool whose steps and ends are written over a socket, by a writer in a thread of this process."""

import os
import socket
import tempfile
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from penstock.pool.sqlite import open_pool
from penstock.pool.sqlite_file import explain, open_database
from penstock.pool.writer import Committer
from penstock.pool.writer_process import WriterProcess


class PoolWithWriter:
    """Delegates to the pool; `close` also ends the writer."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="penstock-")
        address = f"{self._place.name}/scribe"
        self._pool = open_pool(folder, scribe=address, **options)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        orders, self._orders = os.pipe()
        self._thread = threading.Thread(target=self._serve, args=(listener, folder / "pool.db", orders))
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def close(self) -> None:
        await self._pool.close()
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1
            self._thread.join()
            self._place.cleanup()

    def _serve(self, listener: socket.socket, path: Path, orders: int) -> None:
        with listener, closing(Committer(open_database(path), partial(explain, path=path))) as committer:
            WriterProcess(listener, committer).serve(orders)
        os.close(orders)
