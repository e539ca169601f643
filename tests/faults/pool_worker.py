"""A program that writes to a pool until it is killed: many rollouts at once; every acknowledged write is reported as a line."""

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from killable_process import fork_on_request, write_line

from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, Grade, Group, Lease, Node, RolloutRef, Sampling, Step, Task, make_rollout

LANES, PLACES, STEPS, CLAIMED = 12, 2, 15, 3
TASK = Task(id="t", prompt=({"role": "user", "content": "go"},))


def make_node(rollout_id: str, index: int) -> Node:
    """Different for each step, so that a mix-up shows."""
    parent = index - 1 if index else None
    chain = f"{rollout_id} n{index}"
    return Node(
        rollout_id=rollout_id, id=index, parent=parent, token_ids=(index,) * 50, messages_digest=chain, messages=TASK.prompt
    )


def make_step(rollout_id: str, index: int) -> Step:
    """The same in every process: what a step must be is known from its name."""
    return Step(
        rollout_id=rollout_id,
        index=index,
        node=index,
        transcript="main",
        completion_ids=tuple(range(index, index + 100)),
        logprobs=(-0.5 - index,) * 100,
        versions=(index,) * 100,
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": f"{rollout_id} says {index}"},
        messages_digest=f"{rollout_id} s{index}",
    )


class Worker:
    """Writes groups and trains them; `say` is notified of everything once it is durable."""

    def __init__(self, pool: Pool, say: Callable[[str], None], *, lease_s: float = 60.0) -> None:
        self._pool, self._say, self._lease_s = pool, say, lease_s

    async def work(self, *, takes_up: bool) -> None:
        """Continue with what an earlier process left, where that one is dead, then with new groups; a trainer works in parallel."""
        left = iter(await self._pool.unfinished("train") if takes_up else [])
        if takes_up:
            await self._pool.release()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(LANES):
                tasks.create_task(self._write_groups(left))
            tasks.create_task(self._train_groups())

    async def _write_groups(self, left: Iterator[Group]) -> None:
        while True:
            group = next(left, None)
            rollouts = [a.ref for a in group.rollouts if a.end is None] if group else await self._open_group()
            async with asyncio.TaskGroup() as tasks:
                for rollout in rollouts:
                    tasks.create_task(self._write_rollout(rollout))

    async def _open_group(self) -> list[RolloutRef]:
        name = f"train-{secrets.token_hex(6)}"
        rollouts = [make_rollout(name, TASK.id, place) for place in range(PLACES)]
        await self._pool.open_group(TASK, rollouts, seq=None)
        self._say(f"group {name}")
        return rollouts

    async def _write_rollout(self, rollout: RolloutRef) -> None:
        """Its steps from the first that is not there, its grade, its end."""
        before = await self._pool.rollout(rollout.id)
        for index in range(len(before.steps), STEPS):
            await self._pool.append(make_step(rollout.id, index), make_node(rollout.id, index))
            self._say(f"step {rollout.id} {index}")
        if not before.grades:
            await self._pool.grade(Grade(rollout_id=rollout.id, reward=1.0, source="writer"))
            self._say(f"grade {rollout.id}")
        await self._pool.end(rollout.id, End.COMPLETED)
        self._say(f"end {rollout.id}")

    async def hold(self) -> None:
        """Borrow groups for ever."""
        await self._borrow()
        await asyncio.Event().wait()

    async def _borrow(self) -> Lease:
        while True:
            position = await self._pool.position()
            lease = await self._pool.claim(CLAIMED, version=STEPS, max_staleness=2 * STEPS, lease_s=self._lease_s)
            if lease is not None:
                for group in lease.groups:
                    self._say(f"lent {group.id}")
                return lease
            await self._pool.wait(position, timeout_s=10)

    async def _train_groups(self) -> None:
        while True:
            lease = await self._borrow()
            await self._pool.ack(lease.id, STEPS)
            for group in lease.groups:
                self._say(f"trained {group.id}")


def wrong(group: Group) -> list[str]:
    """What is not as some process wrote it."""
    found: list[str] = []
    for attempt in group.rollouts:
        name, count = attempt.ref.id, len(attempt.steps)
        if list(attempt.steps) != [make_step(name, index) for index in range(count)]:
            found.append(f"steps of {name}")
        if list(attempt.nodes) != [make_node(name, index) for index in range(count)]:
            found.append(f"nodes of {name}")
        if attempt.end and (count != STEPS or len(attempt.grades) != 1 or attempt.end is not End.COMPLETED):
            found.append(f"end of {name}")
    return found


def live() -> None:
    """Run until killed: `alone` (resumes unfinished groups), `with_others`, or only `holds` a lease."""
    name, folder, url, how, lease_s = sys.argv[1:]

    async def whole() -> None:
        pool = POOLS.load(name)(Path(folder), url=url)
        worker = Worker(pool, write_line, lease_s=float(lease_s))
        await (worker.hold() if how == "holds" else worker.work(takes_up=how == "alone"))

    asyncio.run(whole())


if __name__ == "__main__":
    POOLS.load(sys.argv[1])
    fork_on_request(live)
