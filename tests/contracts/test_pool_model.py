"""Random lives of the SQLite pool, with the memory pool as the model: both must say the same at every step."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_cases import TASK, FakeClock, make_node, make_step, places

from penstock.errors import PoolError
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, Grade, Lease

REFUSED = "refused"
CHANNELS = ["train", "val"]

seqs, sizes, places_, attempts, versions = (st.integers(low, high) for low, high in ((0, 3), (1, 2), (0, 1), (1, 3), (0, 4)))
channels = st.sampled_from(CHANNELS)
rollout_ids = st.builds("{}-{}.{}.{}".format, channels, seqs, places_, attempts)


class PoolModel(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.model: Pool = POOLS.load("memory")(self.folder, clock=self.clock)
        self.pool: Pool = POOLS.load("sqlite")(self.folder, clock=self.clock)
        self.leases: list[tuple[str, str]] = []

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

    @rule(seq=seqs, size=sizes, channel=channels)
    def open_group(self, seq: int, size: int, channel: str) -> None:
        self.both(lambda pool: pool.open_group(TASK, places(seq, size, channel), seq=seq))

    @rule(
        rollout_id=rollout_ids,
        index=st.integers(0, 2),
        version=versions,
        token=st.integers(0, 1),
        with_node=st.booleans(),
        branch=st.booleans(),
    )
    def append(self, rollout_id: str, index: int, version: int, token: int, with_node: bool, branch: bool) -> None:
        step = make_step(rollout_id, index, version=version, completion_ids=(token, 8, 9))
        parent = None if branch or not index else index - 1
        node = make_node(rollout_id, index, parent=parent, reason="edited" if branch else None)
        self.both(lambda pool: pool.append(step, node if with_node else None))

    @rule(rollout_id=rollout_ids, reward=st.sampled_from([0.0, 1.0, float("nan")]), step=st.sampled_from([None, 0]))
    def grade(self, rollout_id: str, reward: float, step: int | None) -> None:
        self.both(lambda pool: pool.grade(Grade(rollout_id=rollout_id, reward=reward, source="g", step=step)))

    @rule(rollout_id=rollout_ids, end=st.sampled_from(End))
    def end(self, rollout_id: str, end: End) -> None:
        self.both(lambda pool: pool.end(rollout_id, end, "because"))

    @rule(channel=channels, seq=seqs)
    def end_group(self, channel: str, seq: int) -> None:
        for group in self.both(lambda pool: pool.unfinished(channel)):
            for attempt in group.attempts if group.seq == seq else ():
                self.both(lambda pool, name=attempt.rollout.id: pool.end(name, End.COMPLETED))

    @rule(channel=channels, seq=seqs, place=places_, attempt=attempts)
    def replace(self, channel: str, seq: int, place: int, attempt: int) -> None:
        lost = places(seq, 2, channel)[place]
        for _ in range(attempt - 1):
            lost = lost.successor
        self.both(lambda pool: pool.replace(lost, "gone"))

    @rule(
        count=st.integers(1, 2),
        channel=channels,
        version=versions,
        max_staleness=st.integers(0, 3),
        lease_s=st.sampled_from([0.0, 1e9]),
    )
    def claim(self, **wanted: Any) -> None:
        count = wanted.pop("count")
        expected, got = (self.outcome(pool, lambda pool: pool.claim(count, **wanted)) for pool in (self.model, self.pool))
        if isinstance(expected, Lease) and isinstance(got, Lease):
            self.leases.append((expected.id, got.id))
            got = replace(got, id=expected.id)
        assert got == expected

    def on_lease(self, which: int, call: Callable[[Pool, str], Awaitable[Any]]) -> None:
        mine, theirs = self.leases[which % len(self.leases)]
        assert self.outcome(self.pool, lambda pool: call(pool, theirs)) == self.outcome(self.model, lambda pool: call(pool, mine))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9), lease_s=st.sampled_from([0.0, 1e9]))
    def renew(self, which: int, lease_s: float) -> None:
        self.on_lease(which, lambda pool, lease_id: pool.renew(lease_id, lease_s))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.on_lease(which, lambda pool, lease_id: pool.release(lease_id))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9), version=versions)
    def ack(self, which: int, version: int) -> None:
        self.on_lease(which, lambda pool, lease_id: pool.ack(lease_id, version))

    @rule()
    def release_all(self) -> None:
        self.both(lambda pool: pool.release())

    @rule(rollout_id=rollout_ids)
    def attempt(self, rollout_id: str) -> None:
        self.both(lambda pool: pool.attempt(rollout_id))

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.pool.close())
        self.pool = POOLS.load("sqlite")(self.folder, clock=self.clock)

    @invariant()
    def same_contents(self) -> None:
        for channel in CHANNELS:
            self.both(lambda pool, channel=channel: pool.groups(channel))
            self.both(lambda pool, channel=channel: pool.stats(channel))
        trained = self.both(lambda pool: pool.trained())
        assert len({group for group, _ in trained}) == len(trained)


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
