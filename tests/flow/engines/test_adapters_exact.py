"""Base and several adapters in one batch: each request samples from what a plain forward pass with its own adapter gives."""

import random
from typing import ClassVar
from weakref import WeakSet

import pytest
import torch
from adapter_cases import POLICIES, PolicyWorkload, policy_adapter, random_adapter
from engine_cases import SHAPE, make_decoder

from penstock.engines.embedded.paged_core import PagedCore
from penstock.records import Sampling

CORES = pytest.mark.parametrize("paged_steps", [0, 1, 4], ids=["plain", "paged", "paged ahead"])


@CORES
@pytest.mark.parametrize("seed", range(4))
def test_random_workloads_of_three_policies_are_exact(seed: int, paged_steps: int):
    rng = random.Random(seed)
    slots = rng.choice([3, 8])
    cache = rng.choice([500 + 50 * slots, 20_000])
    work = PolicyWorkload(rng, slots, cache, pass_tokens=rng.choice([8, 64, 512]), paged_steps=paged_steps)
    work.play(60, swaps=True)
    assert work.check() > 50
    assert work.core.tree.tokens <= work.core.tree.capacity
    used = {request.policy for request in work.requests}
    assert used == set(POLICIES)


@CORES
def test_a_new_adapter_of_one_policy_leaves_the_others_computed(paged_steps: int):
    work = PolicyWorkload(random.Random(5), slots=8, cache_tokens=20_000, paged_steps=paged_steps)
    for _ in range(6):
        work.ask(work.system, Sampling(max_tokens=40))
    while min(len(request.tokens) for request in work.requests) < 305:
        work.step()
    before = work.core.prefilled if paged_steps else work.decoder.forwarded
    work.record(work.core.drain())
    work.versions["planner"] = 1
    work.core.adapters.put("planner", policy_adapter("planner", 1))
    work.core.reset(["planner"])
    planners = [request for request in work.requests if request.policy == "planner"]
    assert list(work.core.waiting) == planners
    work.play(0, swaps=False)
    after = work.core.prefilled if paged_steps else work.decoder.forwarded - 6 * 40
    assert 0 < len(planners) < 6
    assert after - before < 300 + 60 * len(planners)  # their prompt once, and what each had sampled
    assert work.check() == 40 * 6


@CORES
def test_adapters_may_come_while_the_base_serves(paged_steps: int):
    work = PolicyWorkload(random.Random(7), slots=8, cache_tokens=20_000, paged_steps=paged_steps, late=True)
    work.play(20, swaps=False)
    for _ in range(4):
        work.ask(work.system, Sampling(max_tokens=30))
    for _ in range(3):
        work.step()
    work.add_adapters()
    work.play(40, swaps=True)
    assert work.check() > 100


class GraphDouble:
    """A CUDA graph that is none. As torch does, it refuses a memory pool whose graphs are all gone."""

    alive: ClassVar["WeakSet[GraphDouble]"] = WeakSet()

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert pool is None or any(graph.pool() is pool for graph in self.alive), "use_count > 0 INTERNAL ASSERT FAILED"
        self._pool = object() if pool is None else pool
        self.alive.add(self)

    def capture_end(self) -> None: ...

    def pool(self) -> object:
        return self._pool


def test_what_was_captured_before_the_first_adapter_is_captured_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphDouble)
    core = PagedCore(make_decoder(), slots=4, cache_tokens=2000, graphs=True)
    core.warm_up()
    before = dict(core.lanes.captured)
    core.adapters.put("", random_adapter(SHAPE))
    core.reset([""])
    assert before and not core.lanes.captured
    del before
    core.warm_up()
    after = dict(core.lanes.captured)
    core.adapters.put("", random_adapter(SHAPE, seed=1))
    core.reset([""])
    assert core.lanes.captured == after  # copied in place
