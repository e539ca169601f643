"""A process that has its writes written by another: see `scribe.py`."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson

from penstock.errors import PoolError, PoolFailed
from penstock.pool.sql.database import Database
from penstock.pool.writer import Bulk, Waiting, Writer
from penstock.pool.writer_process import OUTLIVES_S, WriterSettings
from penstock.pool.writer_protocol import encode_request, read_answers
from penstock.system.processes import end_process, read_answer, start_child

T = TypeVar("T")

GONE = "the process that writes to the pool has ended; what it acknowledged is stored, the same command goes on"


class RemoteWriter(asyncio.Protocol):
    """Stands before a `Writer`: values of a kind go to the scribe that listens at `address`, other writes to the writer."""

    def __init__(self, address: str, writer: Writer) -> None:
        self._address, self._writer = address, writer
        self._connecting: asyncio.Task[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: dict[int, Waiting] = {}
        self._count = 0
        self._letters: list[bytes] = []
        self._rest = b""
        self._closed = False

    async def submit(self, write: Callable[[Database], T]) -> T:
        return await self._writer.submit(write)

    async def store(self, bulk: Bulk, value: Any) -> Any:
        """See `Writer.store`; PoolFailed where the scribe is gone, and then it is not known whether the value was stored."""
        if self._transport is None:
            await self._connect()
        job = Waiting()
        self._count += 1
        self._send(encode_request(self._count, bulk, value))
        self._waiting[self._count] = job
        return await job.outcome()

    async def close(self) -> None:
        """Finish what waits, then let go of both."""
        self._closed = True
        while self._waiting:
            await asyncio.wait({job.done for job in self._waiting.values()})
        if self._transport is not None:
            self._transport.close()
        await self._writer.close()

    async def _connect(self) -> None:
        """The first to write connects for all."""
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._open())
        await asyncio.shield(self._connecting)

    async def _open(self) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, self._address)
        except OSError as cause:
            raise PoolFailed(GONE) from cause
        self._transport = cast("asyncio.WriteTransport", transport)

    def _send(self, letter: bytes) -> None:
        """Send a letter; those of one turn of the loop go together."""
        if self._closed:
            raise PoolError("the pool is closed; open it again")
        if self._transport is None or self._transport.is_closing():
            raise PoolFailed(GONE)
        if not self._letters:
            asyncio.get_running_loop().call_soon(self._flush)
        self._letters.append(letter)

    def _flush(self) -> None:
        letters, self._letters = self._letters, []
        if self._transport is not None:
            self._transport.writelines(letters)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            for number, result, error in read_answers(line):
                self._settle([self._waiting.pop(number)], result, error)

    def connection_lost(self, exc: Exception | None) -> None:
        lost, self._waiting = list(self._waiting.values()), {}
        self._settle(lost, None, PoolFailed(GONE))

    def _settle(self, jobs: Sequence[Waiting], result: Any, error: Exception | None) -> None:
        for job in jobs:
            job.result, job.error = result, error
            job.settle()


@asynccontextmanager
async def open_writer_process(folder: Path, *, keeps: Sequence[int] = ()) -> AsyncGenerator[str]:
    """Start the process that writes to the pool in `folder`, which is there, and give its address; leaving ends it.

    It holds the descriptors in `keeps` open for as long as it lives, which may be longer than this process.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as place:  # a socket's path must be short
        settings = WriterSettings(str(folder), f"{place}/scribe")
        process = await start_child("penstock.pool.writer_process", orjson.dumps(settings._asdict()), pass_fds=keeps)
        try:
            answer = await read_answer(process, "the process that writes to the pool died as it started")
            if "error" in answer:
                raise PoolFailed(answer["error"])
            yield settings.socket
        finally:
            assert process.stdin is not None, "it is a pipe"
            await end_process(process, OUTLIVES_S + 1, ask=process.stdin.close)
