"""One rollout, whatever its author wrote, comes to exactly one end and takes nothing else down."""

import asyncio
import contextlib
import math
import sys
from typing import ClassVar

import pytest
from rollout_cases import TASK, Bench, EngineDown, good_grade, outcome

from penstock import get_rollout_context
from penstock.errors import PoolError
from penstock.pool.memory import MemoryPool
from penstock.records import End, Sampling
from penstock.rollout.runner import NO_CALL, REMEDY, STOPPED


async def two_turns(ctx, call):
    await call([ctx.prompt[0]["content"]], "let me see")
    await call(["go on"], "6")


def raising_at(turn, error):
    async def run(ctx, call):
        for number in range(3):
            if number == turn:
                raise error
            await call([str(number)], "ok")

    return run


async def hang(*_):
    await asyncio.Event().wait()


async def swallow_cancellation(*_):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def swallow_everything(*_):
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.Event().wait()


def test_completed_rollout_is_graded_and_reported():
    bench = Bench(two_turns)
    attempt = outcome(bench)
    assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.COMPLETED, 1.0, 2)
    assert [(g.reward, g.source, g.transcript) for g in attempt.grades] == [(1.0, "check", "main")]
    assert [kind for kind, _ in bench.reported] == ["rollout.start", "rollout.grade", "rollout.end"]
    assert bench.reported[-1][1]["seconds"] >= 0.0


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_workflow_that_raises_ends_as_agent_error_and_keeps_steps(turn):
    attempt = outcome(Bench(raising_at(turn, ValueError("two\nlines"))))
    assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.AGENT_ERROR, None, turn)
    assert attempt.message.startswith("workflow 'Work': ValueError: two lines (test_runner.py, line ")


def test_failure_of_the_engine_is_not_the_agents():
    attempt = outcome(Bench(raising_at(1, EngineDown("no engine"))))
    assert (attempt.end, attempt.message.partition(" (")[0]) == (End.ENGINE_ERROR, "workflow 'Work': EngineDown: no engine")


def test_failure_of_engine_is_seen_through_wrappers_and_task_groups():
    async def run(ctx, call):
        async with asyncio.TaskGroup() as group:
            group.create_task(wrapped())

    async def wrapped():
        try:
            raise EngineDown("no engine")
        except EngineDown as cause:
            raise RuntimeError("my client failed") from cause

    attempt = outcome(Bench(run))
    assert attempt.end is End.ENGINE_ERROR
    assert "RuntimeError: my client failed" in attempt.message


class Odd(BaseException):
    """Neither an ordinary error nor one that stops Python, with a code that no set can hold."""

    code: ClassVar = ["engine_error"]


UNUSUAL = [
    SystemExit(3),
    asyncio.CancelledError(),
    RecursionError("deep"),
    TimeoutError("mine"),
    Odd(),
    BaseExceptionGroup("", [Odd()]),
]


@pytest.mark.parametrize("error", UNUSUAL, ids=lambda error: type(error).__name__)
def test_unusual_errors_of_a_workflow_are_its_own(error):
    assert outcome(Bench(raising_at(1, error))).end is End.AGENT_ERROR


def test_error_that_cannot_be_shown_or_stored_is_made_harmless():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert "its message cannot be shown" in outcome(Bench(raising_at(0, Mute()))).message
    assert "half \\ud83d" in outcome(Bench(raising_at(0, ValueError("half \ud83d")))).message
    assert len(outcome(Bench(raising_at(0, ValueError("x" * 100_000)))).message) < 1000


def test_workflow_that_makes_no_call_is_reported_how():
    async def run(ctx, call):
        return "6"

    attempt = outcome(Bench(run))
    assert (attempt.end, attempt.message) == (End.AGENT_ERROR, f"{NO_CALL}; {REMEDY}")


def test_hanging_workflow_ends_as_timeout_and_keeps_its_steps():
    async def run(ctx, call):
        await call(["a"], "b")
        await hang()

    attempt = outcome(Bench(run, agent_timeout_s=0.5))
    assert (attempt.end, len(attempt.steps)) == (End.TIMEOUT, 1)
    assert "rollout.agent_timeout_s = 0.5;" in attempt.message


@pytest.mark.parametrize("guest", [swallow_cancellation, swallow_everything])
def test_workflow_that_ignores_cancellation_is_abandoned(guest):
    bench = Bench(guest, agent_timeout_s=0.05)
    assert outcome(bench).end is End.TIMEOUT  # and asyncio.run came back, although it waits for all tasks it knows
    assert bench.author_tasks.abandoned == 1
    assert "agent.abandoned" in [kind for kind, _ in bench.reported]


def test_late_workflow_that_leaves_in_time_is_not_abandoned():
    bench = Bench(hang, agent_timeout_s=0.05)
    assert outcome(bench).end is End.TIMEOUT
    assert bench.author_tasks.abandoned == 0


def grading(give):
    async def grade(ctx):
        return give(ctx)

    return grade


VERDICTS = {
    "raises": (lambda ctx: 1 / 0, "ZeroDivisionError: division by zero"),
    "exits": (lambda ctx: sys.exit(1), "called sys.exit(1)"),
    "sets nan": (lambda ctx: ctx.set_reward(math.nan), "reward nan is not a finite number"),
    "sets inf for a sample": (lambda ctx: ctx.set_sample_reward("main", math.inf), "reward inf is not"),
    "sets text": (lambda ctx: ctx.set_reward("1.0"), "reward '1.0' is not"),
    "sets none": (lambda ctx: ctx.set_reward(None), "reward None is not"),
    "assigns nan": (lambda ctx: setattr(ctx, "reward", math.nan), "reward nan is not"),
    "assigns a sample's nan": (lambda ctx: setattr(ctx.sample, "reward", math.nan), "reward nan is not"),
    "returns nan": (lambda ctx: math.nan, "reward nan is not"),
    "returns text": (lambda ctx: "good", "reward 'good' is not"),
    "returns true": (lambda ctx: True, "reward True is not"),
    "gives nothing": (lambda ctx: None, "gave no reward for ['main']"),
    "unknown sample": (lambda ctx: ctx.set_sample_reward("other", 1.0), "unknown sample 'other'"),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_grader_without_a_usable_reward_ends_as_grader_error(verdict):
    give, expected = VERDICTS[verdict]
    attempt = outcome(Bench(two_turns, grading(give)))
    assert (attempt.end, attempt.reward, attempt.grades) == (End.GRADER_ERROR, None, ())
    assert attempt.message.startswith("grader 'check': ")
    assert expected in attempt.message


@pytest.mark.parametrize("guest", [hang, swallow_cancellation])
def test_hanging_grader_ends_as_grader_error(guest):
    attempt = outcome(Bench(two_turns, guest, grader_timeout_s=0.05))
    assert attempt.end is End.GRADER_ERROR
    assert "rollout.grader_timeout_s = 0.05" in attempt.message


def test_number_that_a_grader_returns_is_the_rollouts_reward():
    attempt = outcome(Bench(two_turns, grading(lambda ctx: 0.5)))
    assert [(g.transcript, g.reward) for g in attempt.grades] == [(None, 0.5)]


async def two_agents(ctx, call):
    await call(["plan"], "1. look", "planner")
    await call(["look"], "seen", "executor")
    await call(["next"], "2. done", "planner")


def test_grader_sees_each_transcript_whole_and_grades_it():
    seen = {}

    def give(ctx):
        seen.update({name: [m["content"] for m in sample.messages] for name, sample in ctx.samples.items()})
        seen["label"] = ctx.label
        ctx.set_sample_reward("planner", 1.0)
        ctx.set_sample_reward("executor", 0.0)

    attempt = outcome(Bench(two_agents, grading(give)))
    assert seen == {"planner": ["plan", "1. look", "next", "2. done"], "executor": ["look", "seen"], "label": "6"}
    assert {g.transcript: g.reward for g in attempt.grades} == {"planner": 1.0, "executor": 0.0}
    assert attempt.reward == 0.5


def test_transcript_left_without_reward_is_named_unless_whole_is_graded():
    some = outcome(Bench(two_agents, grading(lambda ctx: ctx.set_sample_reward("planner", 1.0))))
    assert "gave no reward for ['executor']" in some.message
    whole = outcome(Bench(two_agents, grading(lambda ctx: ctx.set_reward(0.25))))
    assert (whole.end, whole.reward) == (End.COMPLETED, 0.25)


def test_grader_has_no_model_token():
    def give(ctx):
        assert get_rollout_context() is None
        ctx.sample.messages[0]["content"] = "rewritten"
        ctx.metadata["seen"].append("grader")
        return 1.0

    attempt = outcome(Bench(two_turns, grading(give)))
    assert attempt.end is End.COMPLETED
    assert attempt.nodes[0].messages[0]["content"] == "2 times 3?"
    assert TASK.metadata == {"seen": []}


def test_workflow_gets_copies_and_never_the_label():
    async def run(ctx, call):
        assert not hasattr(ctx, "label")
        await call([ctx.prompt.pop()["content"]], "6")
        ctx.metadata["seen"].append("workflow")
        ctx.config.name = "changed"

    assert outcome(Bench(run)).end is End.COMPLETED
    assert (len(TASK.prompt), TASK.metadata) == (1, {"seen": []})


def test_cancelled_workflow_ends_as_cancelled_and_the_cancellation_continues():
    async def main():
        started = asyncio.Event()

        async def run(ctx, call):
            await call(["a"], "b")
            started.set()
            await hang()

        bench = Bench(run)
        async with bench.opened() as (rollout,):
            job = asyncio.create_task(bench.runner.run(rollout, TASK, Sampling()))
            await started.wait()
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
        attempt = await bench.pool.rollout(rollout.id)
        assert (attempt.end, attempt.message, len(attempt.steps)) == (End.CANCELLED, STOPPED, 1)
        assert bench.gateway.closed == [rollout.id]

    asyncio.run(main())


class SlowPool(MemoryPool):
    """Stands still in the middle of giving an end."""

    def __init__(self):
        super().__init__(lambda: 0.0)
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def end(self, rollout_id, end, message="", grades=()):
        self.reached.set()
        await self.go_on.wait()
        return await super().end(rollout_id, end, message, grades)


def test_cancellation_while_the_end_is_written_does_not_change_it():
    async def main():
        pool = SlowPool()
        bench = Bench(two_turns, pool=pool)
        async with bench.opened() as (rollout,):
            job = asyncio.create_task(bench.runner.run(rollout, TASK, Sampling()))
            await pool.reached.wait()
            job.cancel()
            await asyncio.sleep(0)
            pool.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await job
        attempt = await pool.rollout(rollout.id)
        assert (attempt.end, attempt.reward) == (End.COMPLETED, 1.0)
        assert [kind for kind, _ in bench.reported].count("rollout.end") == 1

    asyncio.run(main())


def test_rollout_that_was_ended_elsewhere_keeps_that_end():
    bench = Bench(raising_at(1, ValueError("late")))

    async def main():
        async with bench.opened() as (rollout,):
            await bench.pool.end(rollout.id, End.LOST, "replaced")
            bench.gateway.call = None
            await bench.runner.run(rollout, TASK, Sampling())
        return await bench.pool.rollout(rollout.id)

    assert asyncio.run(main()).end is End.LOST
    assert bench.reported[-1][1]["end"] == End.LOST


def test_failing_pool_is_not_taken_for_a_failing_agent():
    class Broken(MemoryPool):
        async def end(self, rollout_id, end, message="", grades=()):
            raise PoolError("disk is full")

    with pytest.raises(PoolError, match="disk"):
        asyncio.run(Bench(two_turns, pool=Broken(lambda: 0.0)).attempt())


async def run_all(bench, count):
    async with bench.opened(count) as rollouts, asyncio.TaskGroup() as group:
        for rollout in rollouts:
            group.create_task(bench.runner.run(rollout, TASK, Sampling()))
    return [await bench.pool.rollout(rollout.id) for rollout in rollouts]


def test_two_hundred_rollouts_at_once_do_not_mix():
    async def run(ctx, call):
        for turn in range(3):
            name = get_rollout_context().rollout_id
            await call([f"{name} asks {turn}"], f"{name} says {turn}")

    def give(ctx):
        (name,) = {message["content"].split()[0] for message in ctx.sample.messages}
        return float(name.split(".")[1])

    attempts = asyncio.run(run_all(Bench(run, grading(give)), 200))
    assert [attempt.reward for attempt in attempts] == [float(place) for place in range(200)]
    for attempt in attempts:
        said = [message["content"] for node in attempt.nodes for message in node.messages]
        said += [step.message["content"] for step in attempt.steps]
        assert {text.split()[0] for text in said} == {attempt.ref.id}


def test_failures_leave_their_neighbours_alone():
    async def run(ctx, call):
        place = int(get_rollout_context().rollout_id.split(".")[1])
        await call(["a"], "b")
        await [two_turns, raising_at(0, ValueError("x")), hang, swallow_cancellation][place % 4](ctx, call)

    attempts = asyncio.run(run_all(Bench(run, agent_timeout_s=1), 12))
    expected = [End.COMPLETED, End.AGENT_ERROR, End.TIMEOUT, End.TIMEOUT] * 3
    assert [attempt.end for attempt in attempts] == expected


class Crowd:
    """Counts how many are inside at once. Nobody leaves before ``expected`` visitors met."""

    def __init__(self, expected):
        self.now = self.most = 0
        self.expected, self.met = expected, asyncio.Event()

    async def visit(self):
        self.now += 1
        self.most = max(self.most, self.now)
        if self.most == self.expected:
            self.met.set()
        await self.met.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        self.now -= 1


def test_config_limits_how_many_workflows_and_graders_run_at_once():
    agents, graders = Crowd(3), Crowd(2)

    async def run(ctx, call):
        await agents.visit()
        await call(["a"], "b")

    async def grade(ctx):
        await graders.visit()
        await good_grade(ctx)

    attempts = asyncio.run(run_all(Bench(run, grade, most_agents=3, most_graders=2), 20))
    assert {attempt.end for attempt in attempts} == {End.COMPLETED}
    assert (agents.most, graders.most) == (3, 2)


def test_waiting_for_a_turn_does_not_count_towards_the_deadline():
    async def run(ctx, call):
        if get_rollout_context().rollout_id == "train-0.0.1":
            await hang()
        await two_turns(ctx, call)

    first, *others = asyncio.run(run_all(Bench(run, most_agents=1, agent_timeout_s=1), 4))
    assert first.end is End.TIMEOUT
    assert {attempt.end for attempt in others} == {End.COMPLETED}
