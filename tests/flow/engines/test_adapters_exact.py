"""Base and several adapters in one batch: each request samples from what a plain forward pass with its own adapter gives."""

import random

import pytest
from adapter_cases import POLICIES, PolicyWorkload, policy_adapter

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
