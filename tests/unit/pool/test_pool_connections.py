"""The pool's threads outlive their connections: one that breaks at the worst moment fails its callers and nobody else."""

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, ClassVar

import pytest

from penstock.errors import PoolFailed
from penstock.pool.sql_pool import ReaderThreads
from penstock.pool.sqlite import open_database
from penstock.pool.writer import BatchOperation, Writer


class Broken(Exception):
    """What the connection raises."""


class Breaking:
    """A connection that breaks with the statements named in `at`, and with the one that would undo them; then it is well again."""

    ERRORS: ClassVar[tuple[type[Exception], ...]] = (Broken,)
    in_transaction = False

    def __init__(self, *at: str) -> None:
        self.at, self.begun = list(at), 0

    def begin(self) -> None:
        self.begun += 1
        self.execute("BEGIN")
        self.in_transaction = True

    begin_reading = begin

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        if self.at and sql == self.at[0]:
            del self.at[0]
            raise Broken(sql)
        if sql in ("COMMIT", "ROLLBACK"):
            self.in_transaction = False

    def close(self) -> None:
        """Nothing is held."""


def explain(cause: Exception) -> Exception:
    return PoolFailed("away") if isinstance(cause, Broken) else cause


def play(steps: Callable[[], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await steps()

    asyncio.run(main())


def test_writer_continues_after_a_broken_connection() -> None:
    async def steps() -> None:
        database = Breaking("COMMIT", "ROLLBACK")
        writer = Writer(database, explain)  # type: ignore[arg-type]
        with pytest.raises(PoolFailed):
            await writer.submit(lambda _: "lost")
        database.in_transaction = False  # a new connection
        assert await writer.submit(lambda _: "kept") == "kept"
        await writer.close()

    play(steps)


def test_write_waits_for_others_only_while_the_loop_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pool.writer.GATHER_S", 300.0)

    async def steps() -> None:
        writer = Writer(Breaking(), explain)  # type: ignore[arg-type]
        kind = BatchOperation("any", lambda *_: None, lambda *_: True)
        writer._last_batch = 8  # pyright: ignore[reportPrivateUsage]
        await asyncio.gather(writer.store(kind, 1), writer.store(kind, 2), writer.store(kind, 3))
        assert writer._last_batch == 3  # pyright: ignore[reportPrivateUsage]
        await writer.store(kind, 4)
        await writer.close()

    play(steps)


def test_reader_continues_after_connections_that_broke_with_last_statement() -> None:
    async def steps() -> None:
        databases = [Breaking("ROLLBACK"), Breaking("ROLLBACK")]
        reader = ReaderThreads(databases, explain)  # type: ignore[arg-type]
        for number in range(6):
            assert await reader.run(lambda _, number=number: number) == number
        await reader.close()

    play(steps)


def test_batch_reconnects_once() -> None:
    async def steps() -> None:
        database, begun, block, loop = Breaking(), asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
        writer = Writer(database, explain)  # type: ignore[arg-type]

        async def held() -> None:
            begun.set()
            await block.wait()

        def break_off(*_: object) -> bool:
            database.at = ["COMMIT", *["BEGIN"] * 50]
            return True

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.submit(lambda _: asyncio.run_coroutine_threadsafe(held(), loop).result()))
            await begun.wait()
            lost = [tasks.create_task(fails(writer.store(BatchOperation("any", break_off, break_off), None))) for _ in range(20)]
            await asyncio.sleep(0)
            block.set()
        assert [task.result() for task in lost] == [True] * 20
        assert database.begun == 3  # the first write, the batch, and one try to write it again
        await writer.close()

    async def fails(work: Awaitable[None]) -> bool:
        with pytest.raises(PoolFailed):
            await work
        return True

    play(steps)


def test_waiting_writes_of_one_kind_are_joined() -> None:
    async def steps() -> None:
        done: list[str] = []
        begun, block, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
        writer = Writer(Breaking(), explain)  # type: ignore[arg-type]

        async def held() -> None:
            begun.set()
            await block.wait()

        def first(_: object, values: list[str]) -> bool:
            done.append("".join(values))
            return True

        def last(_: object, values: list[str]) -> bool:
            return first(_, values)

        kinds = {"a": BatchOperation("a", first, first), "b": BatchOperation("b", last, last, result="b", last=True)}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.submit(lambda _: asyncio.run_coroutine_threadsafe(held(), loop).result()))
            await begun.wait()
            for name in "baba.abb":
                alone = partial(lambda name, _: done.append(name), name)
                reported = tasks.create_task(writer.store(kinds[name], name) if name in kinds else writer.submit(alone))
            await asyncio.sleep(0)
            block.set()
        assert (done, reported.result()) == (["aa", "bb", ".", "a", "bb"], "b")
        await writer.close()

    play(steps)


def test_cancelled_write_is_finished_first(tmp_path):
    begun, go = threading.Event(), threading.Event()

    def write(database):
        begun.set()
        assert go.wait(60)
        database.execute("CREATE TABLE kept (x)")

    async def main():
        writer = Writer(open_database(tmp_path / "pool.db"), lambda cause: cause)
        task = asyncio.create_task(writer.submit(write))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await writer.close()

    asyncio.run(main())
    with closing(sqlite3.connect(tmp_path / "pool.db")) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("kept",)]
