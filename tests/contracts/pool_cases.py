"""Records, moves and a clock for the tests of pools."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from postgres_server import server_url

from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, Grade, Group, Lease, Node, RolloutRef, Sampling, Step, Task, make_rollout

KINDS = [*POOLS]
DURABLE = [name for name in KINDS if POOLS.load(name).durable]
TASK = Task(id="t1", prompt=({"role": "user", "content": "6 · 7 = …?"},), label="42", metadata={"row": 3})


class FakeClock:
    """A monotonic clock that moves when the test reports this."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_one(name: str, folder: Path, **options: Any) -> Pool:
    """The pool called `name` for `folder`; PostgreSQL gets a server."""
    where = {"url": server_url()} if name == "postgres" else {}
    return POOLS.load(name)(folder, **where, **options)


def play(name: str, folder: Path, act: Callable[[Pool], Awaitable[None]], **options: Any) -> None:
    """Open the pool called `name`, run `act` on it, close it."""

    async def main() -> None:
        pool = open_one(name, folder, **options)
        try:
            await act(pool)
        finally:
            await pool.close()

    asyncio.run(main())


def places(seq: int, size: int = 2, channel: str = "train") -> list[RolloutRef]:
    return [make_rollout(f"{channel}-{seq}", TASK.id, place, channel=channel) for place in range(size)]


def make_node(rollout_id: str, number: int = 0, **fields: Any) -> Node:
    plain = {"parent": None, "token_ids": (1, 2, 3), "messages_digest": f"n{number}", "messages": TASK.prompt}
    return Node(rollout_id=rollout_id, id=number, **{**plain, **fields})


def make_step(rollout_id: str, index: int = 0, *, version: int = 0, **fields: Any) -> Step:
    plain: dict[str, Any] = {
        "node": index,
        "transcript": "main",
        "completion_ids": (7, 8, 9),
        "logprobs": (-0.5, -1.0, -0.25),
        "full_logprobs": (-0.75, -1.5, -0.125),
        "versions": (version, version, version + 1),
        "sampling": Sampling(temperature=0.7, stop=("</s>",)),
        "finish": "stop",
        "message": {"role": "assistant", "content": "42"},
        "messages_digest": f"s{index}",
    }
    return Step(rollout_id=rollout_id, index=index, **{**plain, **fields})


async def open_groups(pool: Pool, count: int = 1, *, first: int = 0, size: int = 2, channel: str = "train") -> None:
    for seq in range(first, first + count):
        await pool.open_group(TASK, places(seq, size, channel), seq=seq)


async def finish(pool: Pool, rollout: RolloutRef, *, version: int = 0, reward: float = 1.0) -> None:
    await pool.append(make_step(rollout.id, version=version), make_node(rollout.id))
    await pool.grade(Grade(rollout_id=rollout.id, reward=reward, source="grader"))
    assert await pool.end(rollout.id, End.COMPLETED)


async def complete(pool: Pool, *seqs: int, version: int = 0, size: int = 2) -> None:
    for seq in seqs:
        await open_groups(pool, first=seq, size=size)
        for rollout in places(seq, size):
            await finish(pool, rollout, version=version)


async def claim(pool: Pool, count: int = 1, *, version: int = 0, max_staleness: int = 10, lease_s: float = 60.0) -> Lease | None:
    return await pool.claim(count, version=version, max_staleness=max_staleness, lease_s=lease_s)


async def must_claim(pool: Pool, count: int = 1, **options: Any) -> Lease:
    lease = await claim(pool, count, **options)
    assert lease is not None
    return lease


def ids(groups: tuple[Group, ...] | list[Group]) -> list[str]:
    return [group.id for group in groups]
