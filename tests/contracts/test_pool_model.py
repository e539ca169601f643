"""Random operations on each durable pool and on a model of it in plain dictionaries: both must always agree."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dict_pool import DictPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_cases import TASK, FakeClock, make_node, make_step, open_one, places
from postgres_server import server_url

from penstock.errors import PoolError
from penstock.pool.base import Change, GroupLimit, Pool
from penstock.records import End, Grade, Lease, Mark, RolloutRef

REFUSED = "refused"

numbers, versions, flags = st.integers(0, 99), st.integers(0, 4), st.booleans()
channels = st.sampled_from(["train", "train", "val"])
limits = st.sampled_from([None, None, GroupLimit(2, "refuse"), GroupLimit(3, "drop")])
lease_times = st.sampled_from([0.0, 1e9])


def reported(changes: list[Change]) -> dict[str, list[str]]:
    """What happened to each thing, in order."""
    assert [change.position for change in changes] == sorted({change.position for change in changes})
    found: dict[str, list[str]] = {}
    for change in changes:
        found.setdefault(f"{change.channel}/{change.id}", []).append(change.kind)
    return found


class PoolModel(RuleBasedStateMachine):
    name = "sqlite"

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.model: Pool = DictPool(self.clock)
        self.pool: Pool = open_one(self.name, self.folder, clock=self.clock)
        self.rollouts: list[RolloutRef] = []
        self.leases: list[tuple[str, str]] = []
        for seq in range(3):
            self.open_group(seq, 2, "train")
            self.finish_group(2 * seq, seq)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.pool.close())
            self.runner.close()
            shutil.rmtree(self.folder)

    def outcome(self, pool: Pool, call: Callable[[Pool], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            return await call(pool)

        try:
            return self.runner.run(run())
        except PoolError:
            return REFUSED

    def both(self, call: Callable[[Pool], Awaitable[Any]]) -> Any:
        expected, got = self.outcome(self.model, call), self.outcome(self.pool, call)
        assert got == expected
        return got

    def pick(self, number: int) -> RolloutRef:
        return self.rollouts[number % len(self.rollouts)]

    @rule(seq=st.integers(0, 5), size=st.integers(1, 2), channel=channels, min_size=st.sampled_from([0, 0, 1, 2]), limit=limits)
    def open_group(self, seq: int, size: int, channel: str, min_size: int = 0, limit: GroupLimit | None = None) -> None:
        rollouts = places(seq, size, channel)
        if self.both(lambda pool: pool.open_group(TASK, rollouts, seq=seq, min_size=min_size, limit=limit)) == REFUSED:
            return
        self.rollouts += [rollout for rollout in rollouts if rollout not in self.rollouts]

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers, index=st.integers(0, 2), version=versions, token=st.sampled_from([5, 5, 6]), with_node=flags, root=flags)
    def append(self, number: int, index: int, version: int, token: int, with_node: bool, root: bool) -> None:
        name = self.pick(number).id
        step = make_step(name, index, version=version, completion_ids=(token, 8, 9))
        node = make_node(name, index, parent=None if root or not index else index - 1, reason="edited" if root else None)
        self.both(lambda pool: pool.append(step, node if with_node else None))

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers, reward=st.sampled_from([0.0, 1.0, float("nan")]), step=st.sampled_from([None, 0]))
    def grade(self, number: int, reward: float, step: int | None) -> None:
        grade = Grade(rollout_id=self.pick(number).id, reward=reward, source="g", step=step)
        self.both(lambda pool: pool.grade(grade))

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers, end=st.sampled_from(End))
    def end(self, number: int, end: End) -> None:
        self.both(lambda pool: pool.end(self.pick(number).id, end, "because"))

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers, end=st.sampled_from(End), rewards=st.lists(st.sampled_from([0.0, 1.0, float("nan")]), max_size=2))
    def end_graded(self, number: int, end: End, rewards: list[float]) -> None:
        name = self.pick(number).id
        grades = [Grade(rollout_id=name, reward=reward, source="g", step=step or None) for step, reward in enumerate(rewards)]
        self.both(lambda pool: pool.end(name, end, "judged", grades))

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers, end=st.sampled_from(End))
    def end_group(self, number: int, end: End) -> None:
        """All its attempts at once, in few statements."""
        names = [other.id for other in self.rollouts if other.group_id == self.pick(number).group_id]

        async def act(pool: Pool) -> list[Any]:
            ends = await asyncio.gather(*(pool.end(name, end, "all") for name in names), return_exceptions=True)
            return [REFUSED if isinstance(end, PoolError) else end for end in ends]

        self.both(act)

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers, version=versions)
    def finish_group(self, number: int, version: int) -> None:
        for rollout in [other for other in self.rollouts if other.group_id == self.pick(number).group_id]:
            self.both(lambda pool, name=rollout.id: pool.append(make_step(name, 9, version=version), make_node(name, 9)))
            self.both(lambda pool, name=rollout.id: pool.end(name, End.COMPLETED))

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers)
    def replace(self, number: int) -> None:
        lost = self.pick(number)
        successor = self.both(lambda pool: pool.replace(lost, "gone"))
        self.rollouts += [successor] if successor != REFUSED and successor not in self.rollouts else []

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers, step=st.sampled_from([None, 0, 9]), trainable=flags, quality=st.sampled_from([1.0, 0.5, -1.0]))
    def mark(self, number: int, **fields: Any) -> None:
        self.both(lambda pool: pool.mark(Mark(rollout_id=self.pick(number).id, note="seen", **fields)))

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers)
    def drop(self, number: int) -> None:
        self.both(lambda pool: pool.drop(self.pick(number).group_id, "bad"))

    @rule(count=st.sampled_from([1, 1, 2]), channel=channels, version=versions, max_staleness=versions, lease_s=lease_times)
    def claim(self, count: int, **wanted: Any) -> None:
        expected, got = (self.outcome(pool, lambda pool: pool.claim(count, **wanted)) for pool in (self.model, self.pool))
        if isinstance(expected, Lease) and isinstance(got, Lease):
            self.leases.append((expected.id, got.id))
            got = replace(got, id=expected.id)
        assert got == expected

    def on_lease(self, which: int, call: Callable[[Pool, str], Awaitable[Any]]) -> None:
        mine, theirs = self.leases[which % len(self.leases)]
        assert self.outcome(self.pool, lambda pool: call(pool, theirs)) == self.outcome(self.model, lambda pool: call(pool, mine))

    @precondition(lambda self: self.leases)
    @rule(which=numbers, lease_s=lease_times)
    def renew(self, which: int, lease_s: float) -> None:
        self.on_lease(which, lambda pool, lease_id: pool.renew(lease_id, lease_s))

    @precondition(lambda self: self.leases)
    @rule(which=numbers)
    def release(self, which: int) -> None:
        self.on_lease(which, lambda pool, lease_id: pool.release(lease_id))

    @precondition(lambda self: self.leases)
    @rule(which=numbers, version=versions)
    def ack(self, which: int, version: int) -> None:
        self.on_lease(which, lambda pool, lease_id: pool.ack(lease_id, version))

    @precondition(lambda self: self.leases)
    @rule()
    def release_all(self) -> None:
        self.both(lambda pool: pool.release())

    @precondition(lambda self: self.rollouts)
    @rule(number=numbers)
    def attempt(self, number: int) -> None:
        self.both(lambda pool: pool.rollout(self.pick(number).id))

    @precondition(lambda self: self.rollouts)
    @rule()
    def reopen(self) -> None:
        self.runner.run(self.pool.close())
        self.pool = open_one(self.name, self.folder, clock=self.clock)

    @invariant()
    def same_contents(self) -> None:
        async def look(pool: Pool) -> list[Any]:
            seen = [(await pool.groups(channel), await pool.stats(channel)) for channel in ("train", "val")]
            trained = await pool.trained()
            assert len({group for group, _ in trained}) == len(trained)
            return [seen, trained, await pool.unfinished("train"), reported(await pool.changes())]

        self.both(look)


class PostgresModel(PoolModel):
    name = "postgres"

    @initialize()
    def serve(self) -> None:
        """Before the first rule, so that a machine without PostgreSQL skips the test."""
        server_url()


for machine in (PoolModel, PostgresModel):
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestPoolModel = pytest.mark.slow(PoolModel.TestCase)
TestPostgresModel = pytest.mark.slow(PostgresModel.TestCase)
