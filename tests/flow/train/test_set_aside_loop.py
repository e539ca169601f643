"""What the trainer does with groups that it cannot bear: its own loop over a pool in memory and a real learner."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import poisoned_advantages
import pytest
import torch
from training_cases import make_decoder

from penstock.codec import context_digest
from penstock.config import PoolSection, RolloutSection, TrainSection
from penstock.errors import EngineError, PoolError, TrainError
from penstock.events import Events
from penstock.pool.memory import MemoryPool
from penstock.records import End, Grade, Node, Sampling, Step, Task, make_rollout
from penstock.train.advantages.base import described
from penstock.train.advantages.dr_grpo import dr_grpo
from penstock.train.advantages.grpo import grpo
from penstock.train.algorithm import load_advantage
from penstock.train.learner import Learner
from penstock.train.loop import BEYOND, CRASHED, EQUAL, next_step, update_policy
from penstock.train.metrics import Stopwatch
from penstock.train.resources import TrainProgress

GROUPS, SIZE = 2, 2


async def add_group(pool, number, reward=1.0):
    """A complete group; each rollout has one reply."""
    task = Task(id=f"t{number}", prompt=())
    rollouts = [make_rollout(f"train-{number}", task.id, place) for place in range(SIZE)]
    await pool.open_group(task, rollouts, seq=number)
    for place, rollout in enumerate(rollouts):
        reply = (1 + place, 2)
        node = Node(rollout_id=rollout.id, id=0, parent=None, token_ids=(9, 8), messages_digest="", messages=())
        step = Step(
            rollout_id=rollout.id,
            index=0,
            node=0,
            transcript="main",
            completion_ids=reply,
            logprobs=(-1.0, -1.0),
            versions=(0, 0),
            sampling=Sampling(),
            finish="stop",
            message={},
            messages_digest="",
            context_digest=context_digest([9, 8, *reply]),
        )
        await pool.append(step, node)
        grade = Grade(rollout_id=rollout.id, reward=reward * place, source="test")
        await pool.end(rollout.id, End.COMPLETED, "", [grade])


class Publisher:
    async def publish(self, version, change):
        change()


def played(play, *, advantage, groups=4, rewards=(), names=None, **train):
    """Runs `play(run)` over a pool with that many groups."""

    async def main():
        pool, shown, learner = MemoryPool(Path()), [], Learner(make_decoder(), TrainSection(**train, **(names or {})))
        for number in range(groups):
            await add_group(pool, number, dict(rewards).get(number, 1.0))
        events = Events()
        events.listen(lambda kind, fields: shown.append((kind, fields)))
        config = SimpleNamespace(
            rollout=RolloutSection(groups_per_step=GROUPS, group_size=SIZE), pool=PoolSection(), train=learner.section
        )
        run = SimpleNamespace(
            pool=pool,
            events=events,
            config=config,
            learners={"": learner},
            advantage=described(advantage),
            replay=None,
            publisher=Publisher(),
            rollouts=SimpleNamespace(advance=lambda step: None, resting=nullcontext),
            reported=shown,
        )
        async with asyncio.timeout(30):
            return await play(run)

    return asyncio.run(main())


async def step(run):
    return await next_step(run, TrainProgress(), Stopwatch(), asyncio.Event())


def ids(ready):
    return [group.id for group in ready.lease.groups]


@pytest.mark.parametrize("advantage", [poisoned_advantages.raising, poisoned_advantages.huge])
def test_only_the_group_at_fault_is_set_aside(advantage):
    async def play(run):
        ready = await step(run)
        return ready, await run.pool.stats("train"), [fields for kind, fields in run.reported if kind == "group.drop"]

    ready, stats, (shown,) = played(play, advantage=advantage)
    assert (ids(ready), ready.set_aside, stats.drops) == (["train-0", "train-2"], 1, {CRASHED: 1})
    assert (shown["group_id"], shown["reason"]) == ("train-1", CRASHED)


def test_the_update_that_follows_is_that_of_the_others_alone():
    async def play(run):
        await update_policy(run, (await step(run)).update, TrainProgress())
        return [weight.clone() for weight in run.learners[""].decoder.parameters()]

    after = played(play, advantage=poisoned_advantages.huge)
    alone = played(play, advantage=poisoned_advantages.spread, groups=3, rewards={1: 1e308}.items())
    assert all(torch.equal(*pair) for pair in zip(after, alone, strict=True))


def test_old_reward_out_of_bounds_quarantines_its_group():
    async def play(run):
        return (
            ids(await step(run)),
            await run.pool.stats("train"),
            [fields for kind, fields in run.reported if kind == "group.drop"],
        )

    rewards = {0: 1e308, 1: -1e308}
    trained, stats, shown = played(play, advantage=poisoned_advantages.spread, rewards=rewards.items())
    assert (trained, stats.drops) == (["train-2", "train-3"], {BEYOND: 2})
    assert [each["message"] for each in shown] == [
        "rollout train-0.1.1 has reward 1e+308, beyond 1e+09",
        "rollout train-1.1.1 has reward -1e+308, beyond 1e+09",
    ]


def test_failure_that_no_group_repeats_alone_drops_none():
    poisoned_advantages.moody.fails = 1
    ready = played(step, advantage=poisoned_advantages.moody)
    assert (ids(ready), ready.set_aside) == (["train-0", "train-1"], 0)


def test_groups_that_fail_only_together_end_the_run():
    async def play(run):
        together = run.learners[""].compute

        def compute(batch, *rest):
            if batch.rollouts > SIZE:
                raise TrainError("too much")
            return together(batch, *rest)

        run.learners[""].compute = compute
        with pytest.raises(TrainError, match="though"):
            await step(run)
        return await run.pool.stats("train")

    assert played(play, advantage=poisoned_advantages.spread).drops == {}


def test_trainer_that_no_group_passes_ends_with_a_reason():
    async def play(run):
        with pytest.raises(TrainError, match="KeyError"):
            await step(run)
        return await run.pool.stats("train")

    stats = played(play, advantage=poisoned_advantages.broken, groups=8)
    assert (stats.drops, stats.groups) == ({CRASHED: 6}, 8)


NOT_THE_DATA = {
    "memory": lambda: MemoryError("no room"),
    "disk": lambda: OSError(28, "No space left on device"),
    "device memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "allocator": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    "pool": lambda: PoolError("gone"),
    "engine": lambda: EngineError("gone"),
    "ctrl-c": lambda: KeyboardInterrupt(),
}


@pytest.mark.parametrize("name", NOT_THE_DATA)
def test_what_is_not_the_groups_fault_is_raised_unchanged(name):
    async def play(run):
        def fail(group):
            raise NOT_THE_DATA[name]()

        run.advantage = described(fail)
        with pytest.raises(type(NOT_THE_DATA[name]())):
            await step(run)
        return await run.pool.stats("train")

    stats = played(play, advantage=None)
    assert (stats.drops, stats.groups_leased) == ({}, GROUPS)  # the next process gets them back


def test_diverged_weights_are_blamed_on_no_group():
    async def play(run):
        with torch.no_grad():
            next(run.learners[""].decoder.parameters()).fill_(float("nan"))
        with pytest.raises(TrainError, match=r"train\.lr"):
            await step(run)
        return await run.pool.stats("train")

    assert played(play, advantage=poisoned_advantages.spread).drops == {}


def test_failing_later_update_is_skipped():
    async def play(run):
        ready, together = await step(run), run.learners[""].compute

        def compute(batch, proximal=None):
            if proximal is not None:
                raise TrainError("not again")
            return together(batch)

        run.learners[""].compute = compute
        _, progress = await update_policy(run, ready.update, TrainProgress())
        return progress.version, [fields for kind, fields in run.reported if kind == "update.skip"]

    version, shown = played(play, advantage=poisoned_advantages.spread, updates_per_step=3)
    assert (version, shown) == (1, [{"step": 1, "updates": 2, "message": "not again"}])


def test_dynamic_sampling_replaces_groups_that_teach_nothing():
    async def play(run):
        ready = await step(run)
        return ids(ready), (await run.pool.stats("train")).drops, run.reported

    rewards = {0: 0.0, 2: 0.0}  # a reward of 0 for both rollouts
    trained, drops, shown = played(play, advantage=grpo, rewards=rewards.items(), dynamic_sampling=True)
    assert trained == ["train-1", "train-3"] and drops == {EQUAL: 2}
    assert [fields["message"] for kind, fields in shown if kind == "group.drop"] == ["all its rollouts earned the same"] * 2
    trained, drops, _ = played(play, advantage=grpo, rewards=rewards.items())
    assert trained == ["train-0", "train-1"] and drops == {}


def test_a_penalty_in_the_reward_changes_who_is_better():
    """Both rollouts earned the same; the one that left the reference further behind gets less."""

    async def play(run):
        learner = run.learners[""]
        with torch.no_grad():
            for weight in learner.decoder.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        ready = await step(run)
        first = [s for s in ready.update.credit[""].sequences if s.group_id == "train-0"]
        gaps = [sum(each) for each in learner.reference_gaps(first)]
        return [max(s.advantages, key=abs) for s in first], gaps

    settings = {"kl": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    credit, gaps = played(play, advantage=dr_grpo, rewards={0: 0.0}.items(), **settings)
    assert gaps[0] != gaps[1] and (credit[0] > credit[1]) == (gaps[0] < gaps[1])
    assert credit[0] == pytest.approx(-0.5 * (gaps[0] - gaps[1]) / 2, rel=1e-4)


def test_an_advantage_of_tokens_trains_groups_of_equal_reward():
    async def play(run):
        ready = await step(run)
        return ready.update.credit[""], ready.update.parts[""].result.metrics.value_error

    section = {"advantage": "gae", "advantage_settings": {"normalise": False}}
    credit, error = played(play, advantage=load_advantage(TrainSection(**section)), rewards={0: 0.0}.items(), names=section)
    assert credit.counts["groups_equal"] == 0 and credit.counts["tokens"] == 8
    assert [sum(s.advantages) for s in credit.sequences] == pytest.approx([0.0, 0.0, 0.0, 1.95])  # the head still expects 0
    assert error == pytest.approx(2 / 8)
