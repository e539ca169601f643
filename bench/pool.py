"""Durable steps per second of the SQLite pool with 64 writers, over bare SQLite writing the same bytes in as few commits."""

import asyncio
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from penstock.pool.base import Pool
from penstock.pool.migrations import open_database
from penstock.pool.rows import seal
from penstock.pool.sqlite import open_pool
from penstock.records import Node, Sampling, Step, Task, make_rollout

WRITERS, STEPS, CONTEXT, NEW = 64, 16, 2000, 200
ROUNDS = 3
TASK = Task(id="t", prompt=({"role": "user", "content": "multiply"},))
ROLLOUTS = [make_rollout("train-0", TASK.id, place) for place in range(WRITERS)]


def make_call(rollout_id: str, index: int) -> tuple[Step, Node]:
    """A call that shares nothing: a whole context of its own, rendered from scratch."""
    text = "lorem ipsum " * (CONTEXT // 3)
    node = Node(
        rollout_id=rollout_id,
        id=index,
        parent=None,
        token_ids=tuple(range(index, index + CONTEXT)),
        chain=f"{index:064x}",
        messages=({"role": "user", "content": text},),
    )
    step = Step(
        rollout_id=rollout_id,
        index=index,
        node=index,
        transcript="main",
        completion_ids=tuple(range(NEW)),
        logprobs=tuple(-0.001 * i for i in range(NEW)),
        versions=(index,) * NEW,
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": text[:800]},
        chain=f"{index:064x}",
    )
    return step, node


async def pool_rate(folder: Path) -> float:
    """Steps per second when every writer waits for its own step to be durable before the next."""
    pool: Pool = open_pool(folder)
    await pool.open_group(TASK, ROLLOUTS, seq=0)
    calls = {rollout.id: [make_call(rollout.id, index) for index in range(STEPS)] for rollout in ROLLOUTS}

    async def write(rollout_id: str) -> None:
        for step, node in calls[rollout_id]:
            await pool.append(step, node)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for rollout in ROLLOUTS:
            tasks.create_task(write(rollout.id))
    seconds = time.perf_counter() - start
    await pool.close()
    return WRITERS * STEPS / seconds


def floor_rate(folder: Path) -> float:
    """Rows per second of one thread that inserts the same bytes, already packed, `WRITERS` rows to a commit."""
    rows = [[seal(record, "row") for record in make_call(rollout.id, 0)] for rollout in ROLLOUTS]
    blobs = [b"".join((row.record, *(column or b"" for column in row.columns))) for pair in rows for row in pair]
    with closing(open_database(folder / "floor.db")) as database:
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, bytes BLOB)")
        start = time.perf_counter()
        for _ in range(STEPS):
            _insert(database, blobs)
        return WRITERS * STEPS / (time.perf_counter() - start)


def _insert(database: sqlite3.Connection, blobs: list[bytes]) -> None:
    database.execute("BEGIN IMMEDIATE")
    database.executemany("INSERT INTO rows (bytes) VALUES (?)", [(blob,) for blob in blobs])
    database.execute("COMMIT")


def main() -> None:
    """Print the round in the middle of a few; in each, both are measured one after the other."""
    rounds: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            floor, pool = floor_rate(Path(folder)), asyncio.run(pool_rate(Path(folder)))
        rounds.append((pool / floor, pool, floor))
    ratio, pool, floor = sorted(rounds)[ROUNDS // 2]
    print(f"pool: {pool:,.0f} durable steps/s with {WRITERS} writers ({CONTEXT} + {NEW} tokens each)")
    print(f"pool: {ratio:.2f} of bare SQLite, which writes the same bytes, packed beforehand, at {floor:,.0f} steps/s")


if __name__ == "__main__":
    main()
