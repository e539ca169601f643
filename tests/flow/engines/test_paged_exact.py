"""The paged core, which decodes ahead of the host, samples from what a plain forward pass over the whole context gives.

Here its kernels are replaced by plain torch and nothing is captured; `tests/gpu` runs the same on a GPU.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from adapter_cases import TARGETS, policy_adapter
from engine_workloads import Workload, make_weights

from penstock.engines.embedded import lanes, paged_core
from penstock.records import Sampling


@pytest.mark.parametrize("seed", range(12))
def test_random_workloads_are_exact(seed: int):
    rng = random.Random(seed)
    slots = rng.choice([1, 3, 8])
    cache = rng.choice([400 + 50 * slots, 600 * slots, 20_000])
    work = Workload(rng, slots, cache, pass_tokens=rng.choice([8, 64, 512]), paged_steps=rng.choice([1, 3, 8]))
    work.play(40, swaps=seed % 2 == 1)
    assert work.check() > 50
    assert work.core.tree.tokens <= work.core.tree.capacity


@dataclass
class Repeated:
    """Stands in for a captured graph, which needs a GPU: the same work on the same tensors, done again."""

    replay: Callable[[], None]


@pytest.mark.parametrize("seed", range(4))
def test_captured_work_is_exact_though_passes_are_padded(seed: int, monkeypatch: pytest.MonkeyPatch):
    def capture(_: lanes.Lanes, work: Callable[[], None]) -> Repeated:
        work()  # as the real one does, to warm up
        return Repeated(work)

    monkeypatch.setattr(lanes.Lanes, "_capture_work", capture)  # CUDA has no stand-in on a CPU
    monkeypatch.setattr(lanes, "PREFILL_SIZES", (4, 32, 128))
    monkeypatch.setattr(lanes, "CONTEXT_ROWS", 2000)
    rng = random.Random(seed)
    work = Workload(rng, 8, 6000, pass_tokens=256, paged_steps=3, graphs=True)
    work.play(40, swaps=seed % 2 == 1)
    assert work.check() > 50
    assert {*work.core.lanes.captured_passes} <= {4, 32, 128}
    assert work.core.lanes.captured_passes
    assert work.core.lanes.captured


class GraphDouble:
    """Stands in for a CUDA graph, and keeps torch's rule: memory of a pool is shared with a graph that lives, or not at all."""

    living: ClassVar[WeakSet["GraphDouble"]] = WeakSet()
    replay: Callable[[], None]

    def capture_begin(self, pool: object, *, capture_error_mode: str) -> None:
        assert pool is None or any(graph.pool() is pool for graph in self.living)
        self._pool = pool or object()

    def capture_end(self) -> None:
        self.living.add(self)

    def pool(self) -> object:
        return self._pool


def test_adapters_that_come_after_the_first_captures_are_captured_again(monkeypatch: pytest.MonkeyPatch):
    """As in a run on a GPU: the engine warms up while it is opened, and gets the adapters of its policies afterwards."""
    real = lanes.Lanes._capture_work  # pyright: ignore[reportPrivateUsage]

    def capture(self: lanes.Lanes, work: Callable[[], None]) -> Any:
        graph: Any = real(self, work)
        graph.replay = work
        return graph

    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphDouble)  # CUDA has no stand-in on a CPU
    monkeypatch.setattr(lanes.Lanes, "_capture_work", capture)
    monkeypatch.setattr(lanes, "PREFILL_SIZES", (4, 32, 128))
    monkeypatch.setattr(lanes, "CONTEXT_ROWS", 2000)
    work = Workload(random.Random(6), 8, 6000, pass_tokens=256, paged_steps=3, graphs=True)
    work.core.warm_up()
    assert work.core.lanes.captured
    for policy in TARGETS:
        work.core.adapters.put(policy, policy_adapter(policy, 0))
        work.core.reset([policy])
    work.play(20, swaps=False)
    assert work.core.lanes.captured
    assert work.check() > 20


def test_many_lanes_are_decoded_in_longer_windows_with_same_results(monkeypatch: pytest.MonkeyPatch):
    replies: list[list[list[int]]] = []
    windows: list[int] = []
    for many in (1, 1000):
        monkeypatch.setattr(paged_core, "MANY_LANES", many)
        work = Workload(random.Random(3), slots=4, cache_tokens=20_000, paged_steps=5)
        for length in (5, 80, 200):
            work.ask(work.system[:length], Sampling(max_tokens=40, stop_ids=(0, 1)))
        steps = 0
        while not work.core.idle:
            work.step()
            steps += 1
        windows.append(steps)
        assert work.check() > 20
        replies.append([request.tokens for request in work.requests])
    assert replies[0] == replies[1]
    assert windows[0] < windows[1]


def test_queued_steps_do_not_change_sampling():
    replies: list[list[list[int]]] = []
    for steps in (0, 1, 5):
        work = Workload(random.Random(3), slots=4, cache_tokens=20_000, paged_steps=steps)
        for length in (5, 80, 200, 80, 7):
            work.ask(work.system[:length], Sampling(max_tokens=30, stop_ids=(0, 1)))
        work.play(0, swaps=False)
        replies.append([request.tokens for request in work.requests])
    assert replies[0] == replies[1] == replies[2]


def test_requests_that_do_not_fit_together_take_turns_exactly():
    work = Workload(random.Random(1), slots=4, cache_tokens=700, paged_steps=4)
    for _ in range(8):
        work.ask(work.tokens(100), Sampling(max_tokens=120))
    work.play(0, swaps=False)
    assert work.core.prefilled > 8 * 99  # some were computed twice
    assert work.check() == 8 * 120


def test_a_group_is_prefilled_once():
    work = Workload(random.Random(2), slots=32, cache_tokens=30_000, paged_steps=2)
    groups = [work.system + work.tokens(15) for _ in range(4)]
    for prompt in groups * 8:
        work.ask(prompt, Sampling(max_tokens=3))
    work.play(0, swaps=False)
    assert work.core.prefilled == 300 + 4 * 14
    assert work.check() >= 32


def test_the_next_turn_prefills_its_new_tokens_only():
    work = Workload(random.Random(4), slots=2, cache_tokens=20_000, paged_steps=4)
    first = work.ask(work.system, Sampling(max_tokens=20))
    work.play(0, swaps=False)
    before = work.core.prefilled
    work.ask([*first.tokens, 5, 6, 7], Sampling(max_tokens=1))
    work.play(0, swaps=False)
    assert work.core.prefilled - before == 3  # the reply's last token and two of the three new ones; the third is decoded
    work.check()


def test_a_cancelled_request_frees_its_lane_at_the_next_step():
    work = Workload(random.Random(6), slots=1, cache_tokens=20_000, paged_steps=4)
    first = work.ask(work.tokens(20), Sampling(max_tokens=3000))
    second = work.ask(work.tokens(20), Sampling(max_tokens=5))
    work.step()
    work.step()
    work.core.cancel(first)
    work.play(0, swaps=False)
    assert [len(work.sampled[first]), len(work.sampled[second])] == [4, 5]
    work.check()


def test_tokens_of_queued_steps_carry_version_that_drew_them():
    work = Workload(random.Random(5), slots=4, cache_tokens=20_000, paged_steps=4)
    for _ in range(3):
        work.ask([*work.system, 1, 2], Sampling(max_tokens=30))
    for _ in range(3):
        work.step()
    work.swap()
    work.play(0, swaps=False)
    versions = [version for _, version in work.sampled[work.requests[0]]]
    assert versions == [0] * 12 + [1] * 18
    work.check()


def test_nothing_is_held_once_everybody_is_served():
    work = Workload(random.Random(8), slots=3, cache_tokens=2000, pass_tokens=32, paged_steps=3)
    work.play(80, swaps=True)
    assert work.core.tree.capacity == work.core.capacity
    work.swap()
    assert (work.core.tree.tokens, work.core.planned, work.core.running) == (0, [], [])


def test_the_oracle_notices_a_cache_of_old_weights():
    work = Workload(random.Random(9), slots=2, cache_tokens=20_000, paged_steps=4)
    work.ask([*work.system, 1, 2], Sampling(max_tokens=30))
    for _ in range(3):
        work.step()
    work.record(work.core.drain())
    work.version += 1
    work.decoder.load_state_dict(make_weights(1))  # without telling the core
    work.play(0, swaps=False)
    with pytest.raises(AssertionError):
        work.check()
