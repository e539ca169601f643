"""A SQLite pool whose steps and ends are written over a socket, by a writer in a thread of this process."""

import os
import socket
import tempfile
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from penstock.pool.sql.sqlite import explain, open_database
from penstock.pool.sqlite import SqlitePool
from penstock.pool.writer import BatchWriter
from penstock.pool.writer_process import WriterProcess


class PoolWithWriter:
    """Delegates to the pool; `close` also ends the writer."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="penstock-")
        address = f"{self._place.name}/writer"
        self._pool = SqlitePool(folder, writer_address=address, **options)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        starter_pipe, self._starter_pipe = os.pipe()
        self._thread = threading.Thread(target=self._serve, args=(listener, folder / "pool.db", starter_pipe))
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def close(self) -> None:
        await self._pool.close()
        if self._starter_pipe >= 0:
            os.close(self._starter_pipe)
            self._starter_pipe = -1
            self._thread.join()
            self._place.cleanup()

    def _serve(self, listener: socket.socket, path: Path, starter_pipe: int) -> None:
        with listener, closing(BatchWriter(open_database(path), partial(explain, path=path))) as writer:
            WriterProcess(listener, writer).serve(starter_pipe)
        os.close(starter_pipe)
