"""The client of a writer process: sends it the steps and ends of this process. Also starts one."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson

from penstock.errors import PoolError, PoolFailed
from penstock.pool.sql.database import PoolDatabase
from penstock.pool.writer import AwaitedWrite, BatchOperation, Writer
from penstock.pool.writer_process import DRAIN_S, WriterSettings
from penstock.pool.writer_protocol import decode_answers, encode_request
from penstock.system.processes import end_process, read_answer, start_child

T = TypeVar("T")

WRITER_GONE = "the process that writes to the pool has ended; what it acknowledged is stored, the same command goes on"


class RemoteWriter(asyncio.Protocol):
    """Sends batch operations to the writer process at `address`, and leaves other writes to a local `Writer`."""

    def __init__(self, address: str, writer: Writer) -> None:
        self._address, self._writer = address, writer
        self._connecting: asyncio.Task[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: dict[int, AwaitedWrite] = {}
        self._last_number = 0
        self._outgoing: list[bytes] = []
        self._partial_line = b""
        self._closed = False

    async def submit(self, write: Callable[[PoolDatabase], T]) -> T:
        return await self._writer.submit(write)

    async def store(self, operation: BatchOperation, value: Any) -> Any:
        """Do as `Writer.store`. PoolFailed if the writer process is gone: the value may or may not have been stored."""
        if self._transport is None:
            await self._connect()
        write = AwaitedWrite()
        self._last_number += 1
        self._send(encode_request(self._last_number, operation, value))
        self._waiting[self._last_number] = write
        return await write.outcome()

    async def close(self) -> None:
        """Finish all writes, then close the connection and the local writer."""
        self._closed = True
        while self._waiting:
            await asyncio.wait({write.done for write in self._waiting.values()})
        if self._transport is not None:
            self._transport.close()
        await self._writer.close()

    async def _connect(self) -> None:
        # the first to write connects for all; shielded, so that its cancellation does not fail the others
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._open())
        await asyncio.shield(self._connecting)

    async def _open(self) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, self._address)
        except OSError as cause:
            raise PoolFailed(WRITER_GONE) from cause
        self._transport = cast("asyncio.WriteTransport", transport)

    def _send(self, request: bytes) -> None:
        """Send a request; those of one turn of the event loop go together."""
        if self._closed:
            raise PoolError("the pool is closed; open it again")
        if self._transport is None or self._transport.is_closing():
            raise PoolFailed(WRITER_GONE)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(request)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.writelines(outgoing)

    def data_received(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            for number, result, error in decode_answers(line):
                self._settle([self._waiting.pop(number)], result, error)

    def connection_lost(self, exc: Exception | None) -> None:
        lost, self._waiting = list(self._waiting.values()), {}
        self._settle(lost, None, PoolFailed(WRITER_GONE))

    def _settle(self, writes: Sequence[AwaitedWrite], result: Any, error: Exception | None) -> None:
        for write in writes:
            write.result, write.error = result, error
            write.settle()


@asynccontextmanager
async def open_writer_process(folder: Path, *, keeps: Sequence[int] = ()) -> AsyncGenerator[str]:
    """Start a writer process for the pool in `folder`, which must exist, and yield its address. Leaving ends it.

    It keeps the descriptors in `keeps` open while it lives, which may be longer than this process.
    """
    # not in the run folder: the path of a socket must be short
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as scratch:
        settings = WriterSettings(str(folder), f"{scratch}/writer")
        process = await start_child("penstock.pool.writer_process", orjson.dumps(settings._asdict()), pass_fds=keeps)
        try:
            answer = await read_answer(process, "the process that writes to the pool died as it started")
            if "error" in answer:
                raise PoolFailed(answer["error"])
            yield settings.socket
        finally:
            assert process.stdin is not None, "it is a pipe"
            await end_process(process, DRAIN_S + 1, ask=process.stdin.close)
