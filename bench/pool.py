"""What durability costs: the SQLite pool against bare SQLite and a bare file that take the same bytes, and the pool as it grows.

`python -m bench.pool [--steps 1000000] [--json]`; a ratio is of two measurements in one round, the middle one of a few.
"""

import argparse
import asyncio
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.pool.base import Pool
from penstock.pool.rows import encode_row
from penstock.pool.sqlite import SqlitePool, open_database
from penstock.records import End, Grade, Node, RolloutRef, Sampling, Step, Task, make_rollout

WRITERS = {1: 100, 16: 40, 256: 8}
"""Concurrent writers, and how many steps each of them writes."""
CONTEXT, NEW = 2000, 200
ROUNDS = 3
TURNS, TURN_TOKENS = 20, 120
GROUP_SIZE, AT_ONCE = 8, 32
WINDOW = 10_000
TASK = Task(id="t", prompt=({"role": "user", "content": "multiply"},))
WORDS = random.Random(0).choices([f"{word}{n}" for word in ("lorem", "ipsum", "dolor", "sit") for n in range(500)], k=10_000)


class Rates(NamedTuple):
    pool: float
    sqlite: float
    file: float


def make_call(
    rollout_id: str, index: int, *, parent: int | None = None, context: int = CONTEXT, new: int = NEW
) -> tuple[Step, Node]:
    """A call whose node adds `context` tokens, about two to a word, and whose reply has `new`."""
    spread = random.Random(index)
    at = spread.randrange(len(WORDS) // 2)
    node = Node(
        rollout_id=rollout_id,
        id=index,
        parent=parent,
        token_ids=tuple(spread.choices(range(50_000), k=context)),
        messages_digest=f"{index:032x}",
        messages=({"role": "user", "content": " ".join(WORDS[at : at + context // 2])},),
    )
    step = Step(
        rollout_id=rollout_id,
        index=index,
        node=index,
        transcript="main",
        completion_ids=tuple(spread.choices(range(50_000), k=new)),
        logprobs=tuple(-spread.random() for _ in range(new)),
        versions=(index,) * new,
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": " ".join(WORDS[at : at + new // 2])},
        messages_digest=f"{index:032x}",
    )
    return step, node


async def pool_rate(folder: Path, writers: int) -> float:
    """Steps per second when every writer waits for its own step to be durable before the next."""
    pool: Pool = SqlitePool(folder)
    rollouts, steps = [make_rollout("train-0", TASK.id, place) for place in range(writers)], WRITERS[writers]
    await pool.open_group(TASK, rollouts, seq=0)
    calls = {rollout.id: [make_call(rollout.id, index) for index in range(steps)] for rollout in rollouts}

    async def write(rollout_id: str) -> None:
        for step, node in calls[rollout_id]:
            await pool.append(step, node)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for rollout in rollouts:
            tasks.create_task(write(rollout.id))
    seconds = time.perf_counter() - start
    await pool.close()
    return writers * steps / seconds


def packed(writers: int) -> list[bytes]:
    """The bytes of one step of each writer, as the pool stores them."""
    made: list[bytes] = []
    for place in range(writers):
        rows = [encode_row(record, "row") for record in make_call(f"train-0.{place}.1", place)]
        made.append(b"".join(b"".join((row.record, *(column or b"" for column in row.columns))) for row in rows))
    return made


def sqlite_rate(folder: Path, writers: int) -> float:
    """Steps per second of one thread that inserts those bytes, one step of every writer to a commit."""
    blobs, rounds = packed(writers), WRITERS[writers]
    with closing(open_database(folder / "floor.db")) as database:
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, bytes BLOB)")
        start = time.perf_counter()
        for _ in range(rounds):
            _insert(database, blobs)
        return writers * rounds / (time.perf_counter() - start)


def _insert(database: sqlite3.Connection, blobs: list[bytes]) -> None:
    database.execute("BEGIN IMMEDIATE")
    database.executemany("INSERT INTO rows (bytes) VALUES (?)", [(blob,) for blob in blobs])
    database.execute("COMMIT")


def file_rate(folder: Path, writers: int) -> float:
    """Steps per second of appending those bytes to a file, one step of every writer to a sync."""
    blobs, rounds = packed(writers), WRITERS[writers]
    with (folder / "floor.bin").open("ab", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(rounds):
            file.write(b"".join(blobs))
            os.fsync(file.fileno())
        return writers * rounds / (time.perf_counter() - start)


def rates(writers: int) -> Rates:
    """The round in the middle, by the pool's share of bare SQLite."""
    rounds: list[Rates] = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            floor, file = sqlite_rate(folder, writers), file_rate(folder, writers)
            rounds.append(Rates(asyncio.run(pool_rate(folder / "pool", writers)), floor, file))
    return sorted(rounds, key=lambda rate: rate.pool / rate.sqlite)[ROUNDS // 2]


async def end_us(folder: Path) -> float:
    """Processor time of a grade and an end, where many rollouts end at once."""
    pool: Pool = SqlitePool(folder)
    costs: list[float] = []
    for seq in range(ROUNDS):
        groups = [[make_rollout(f"train-{seq}-{n}", TASK.id, place) for place in range(GROUP_SIZE)] for n in range(AT_ONCE)]
        for group in groups:
            await pool.open_group(TASK, group, seq=seq)
        start = time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for name in [rollout.id for group in groups for rollout in group]:
                tasks.create_task(pool.end(name, End.COMPLETED, grades=[Grade(rollout_id=name, reward=1.0, source="bench")]))
        costs.append((time.process_time() - start) / (AT_ONCE * GROUP_SIZE) * 1e6)
    await pool.close()
    return sorted(costs)[ROUNDS // 2]


async def bytes_per_step(folder: Path) -> tuple[float, float]:
    """Of rollouts with many turns: as the pool stores them, and as rows that hold each call's whole context."""
    pool: Pool = SqlitePool(folder)
    rollouts = [make_rollout("train-0", TASK.id, place) for place in range(GROUP_SIZE * 4)]
    await pool.open_group(TASK, rollouts, seq=0)
    whole = sqlite3.connect(folder / "whole.db")
    whole.execute("CREATE TABLE calls (id INTEGER PRIMARY KEY, record BLOB, token_ids BLOB)")
    for rollout in rollouts:
        ids: tuple[int, ...] = ()
        messages: tuple[dict[str, Any], ...] = ()
        for index in range(TURNS):
            step, node = make_call(
                rollout.id, index, parent=index - 1 if index else None, context=TURN_TOKENS, new=TURN_TOKENS // 2
            )
            await pool.append(step, node)
            ids, messages = ids + node.token_ids, (*messages, *node.messages)
            context = encode_row(
                Node(
                    rollout_id=rollout.id,
                    id=index,
                    parent=None,
                    token_ids=ids,
                    messages_digest=node.messages_digest,
                    messages=messages,
                ),
                "x",
            )
            reply = encode_row(step, "x")
            columns = b"".join(column or b"" for column in (*context.columns, *reply.columns))
            whole.execute("INSERT INTO calls (record, token_ids) VALUES (?, ?)", (context.record + reply.record, columns))
            ids, messages = ids + step.completion_ids, (*messages, step.message)
    await pool.close()
    whole.commit()
    whole.close()
    steps = len(rollouts) * TURNS
    return (folder / "pool.db").stat().st_size / steps, (folder / "whole.db").stat().st_size / steps


class Growth(NamedTuple):
    """The pool at some size."""

    steps: int
    step_us: float
    """Processor time of one step with its share of opening, grading and ending, over the last window."""
    claim_ms: float
    """Of claiming a group and giving it back, the middle of several."""


async def growth(folder: Path, total: int) -> list[Growth]:
    """What a step and a claim cost as the pool fills, at each power of ten."""
    pool: Pool = SqlitePool(folder)
    found: list[Growth] = []
    marks = iter([10**power for power in range(4, 7) if 10**power <= total])
    mark, written, window_at, cpu = next(marks), 0, 0, time.process_time()
    for seq in range(total):
        if seq % AT_ONCE == 0:
            async with asyncio.TaskGroup() as tasks:
                for number in range(seq, seq + AT_ONCE):
                    tasks.create_task(_fill(pool, number))
            written += AT_ONCE * GROUP_SIZE * TURNS
        if written - window_at >= WINDOW or written >= mark:
            spent, cpu = time.process_time() - cpu, time.process_time()
            per_step, window_at = spent / max(1, written - window_at) * 1e6, written
            if written >= mark:
                found.append(Growth(written, per_step, await _claim_ms(pool)))
                cpu = time.process_time()
                mark = next(marks, 0)
                if not mark:
                    break
    await pool.close()
    return found


async def _fill(pool: Pool, seq: int) -> None:
    """A group, start to end."""
    rollouts: list[RolloutRef] = [make_rollout(f"train-{seq}", TASK.id, place) for place in range(GROUP_SIZE)]
    await pool.open_group(TASK, rollouts, seq=seq)
    for step, node in SMALL:
        for rollout in rollouts:
            await pool.append(replace(step, rollout_id=rollout.id), replace(node, rollout_id=rollout.id))
    for rollout in rollouts:
        await pool.end(rollout.id, End.COMPLETED, grades=[Grade(rollout_id=rollout.id, reward=1.0, source="bench")])


SMALL = [make_call("", index, parent=index - 1 if index else None, context=16, new=16) for index in range(TURNS)]


async def _claim_ms(pool: Pool) -> float:
    times: list[float] = []
    for _ in range(9):
        start = time.perf_counter()
        lease = await pool.claim(1, version=TURNS, max_staleness=TURNS, lease_s=60)
        times.append((time.perf_counter() - start) * 1e3)
        assert lease is not None
        await pool.release(lease.id)
    return sorted(times)[len(times) // 2]


def measure(total: int) -> dict[str, Any]:
    found: dict[str, Any] = {"steps_per_s": {writers: rates(writers)._asdict() for writers in WRITERS}}
    most = found["steps_per_s"][max(WRITERS)]
    found["over_sqlite_256"] = most["pool"] / most["sqlite"]
    found["over_file_256"] = most["pool"] / most["file"]
    with tempfile.TemporaryDirectory() as folder:
        found["end_us"] = asyncio.run(end_us(Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        ours, whole = asyncio.run(bytes_per_step(Path(folder)))
    found |= {"bytes_per_step": ours, "bytes_whole": whole, "smaller": whole / ours}
    with tempfile.TemporaryDirectory() as folder:
        sizes = asyncio.run(growth(Path(folder), total))
    found["growth"] = [size._asdict() for size in sizes]
    found["cost_growth"] = sizes[-1].step_us / sizes[0].step_us
    found["claim_growth"] = sizes[-1].claim_ms / sizes[0].claim_ms
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pool")
    parser.add_argument("--steps", type=int, default=100_000, help="how far the pool grows")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args([] if arguments is None else arguments)
    found = measure(max(given.steps, 10_000))
    if given.json:
        print(json.dumps(found))
        return
    for writers, rate in found["steps_per_s"].items():
        shares = f"{rate['pool'] / rate['sqlite']:.2f} of bare SQLite, {rate['pool'] / rate['file']:.2f} of a bare file with fsync"
        print(f"pool: {rate['pool']:,.0f} durable steps/s with {writers} writers ({CONTEXT} + {NEW} tokens each): {shares}")
    print(f"pool: a graded end costs {found['end_us']:.0f} µs of processor time where {AT_ONCE * GROUP_SIZE} end at once")
    print(
        f"pool: {found['bytes_per_step']:,.0f} bytes a step on {TURNS} turns; whole contexts take {found['smaller']:.1f} times that"
    )
    for size in found["growth"]:
        cost = f"one costs {size['step_us']:.0f} µs of processor time, a claim {size['claim_ms']:.1f} ms"
        print(f"pool: at {size['steps']:,} steps {cost}")
    print(f"pool: cost of a step grew {found['cost_growth']:.2f} times, of a claim {found['claim_growth']:.2f} times")


if __name__ == "__main__":
    main(sys.argv[1:])
