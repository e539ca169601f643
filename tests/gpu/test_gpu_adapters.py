"""Adapters on a GPU: captured steps of several adapters are exact, compiled updates have the flat gradients."""

import random

import pytest
import torch
from adapter_cases import POLICIES, TARGETS, PolicyWorkload, policy_adapter, random_adapter
from engine_workloads import Workload
from gpu_only import NEEDS_GPU
from test_gpu_training import SHAPE, TOLERANCES, CompiledLearner, make_decoder, some_tree

from penstock.config import TrainSection
from penstock.train.batches import pack

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("seed", range(3))
def test_random_workloads_of_three_policies_are_exact(seed: int):
    rng = random.Random(seed)
    work = PolicyWorkload(rng, 8, 20_000, pass_tokens=rng.choice([64, 512]), paged_steps=rng.choice([1, 4]), device="cuda")
    work.play(60, swaps=True)
    assert work.check() > 50
    assert work.core.lanes.captured
    assert {request.policy for request in work.requests} == set(POLICIES)


def test_a_new_version_of_an_adapter_needs_no_other_capture():
    work = PolicyWorkload(random.Random(5), 8, 20_000, paged_steps=4, device="cuda")
    work.play(30, swaps=False)
    captured = dict(work.core.lanes.captured)
    work.swap()
    work.play(10, swaps=False)
    assert captured and all(work.core.lanes.captured[key] is graph for key, graph in captured.items())
    assert work.check() > 50


def test_engine_that_was_warm_before_its_first_adapter_continues():
    work = PolicyWorkload(random.Random(6), 8, 20_000, paged_steps=4, device="cuda", late=True)
    work.core.warm_up()
    work.play(20, swaps=False)
    work.add_adapters()
    work.play(30, swaps=True)
    assert work.check() > 50


def test_adapters_that_come_after_the_first_captures_are_captured_again():
    """As in a run: the engine warms up while it is opened, and gets the adapters of its policies afterwards."""
    work = Workload(random.Random(6), 8, 20_000, paged_steps=4, device="cuda")
    work.core.warm_up()
    before = dict(work.core.lanes.captured)
    for policy in TARGETS:
        work.core.adapters.put(policy, policy_adapter(policy, 0))
        work.core.reset([policy])
    work.play(60, swaps=False)
    assert before and work.core.lanes.captured
    assert work.check() > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_updates_have_the_gradients_of_the_flat_path(dtype: torch.dtype):
    tree, found = some_tree(0), list[dict[str, torch.Tensor]]()
    for shared in (False, True):
        adapter = random_adapter(SHAPE, rank=8, size=0.05)
        for parameter in adapter.parameters.values():
            parameter.data = parameter.data.to("cuda", dtype)
        learner = CompiledLearner(make_decoder(dtype), TrainSection(method="lora", grad_clip=1e9), adapter=adapter)
        learner.compute(pack(tree, rollouts=15, tokens_per_pass=2048, shared_prefix=shared))
        found.append({name: value.grad.float() for name, value in learner._masters.items() if value.grad is not None})  # pyright: ignore[reportPrivateUsage]
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2 * 7 * SHAPE.layers
    errors = {name: float((found[1][name] - flat).norm() / flat.norm()) for name, flat in found[0].items()}
    assert max(errors.values()) < TOLERANCES[dtype], max(errors, key=lambda name: errors[name])
