"""Agents that block the event loop: the line is told, the work goes on in threads, deadlines hold."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from framework_cases import TASK, call, engine
from gateway_cases import renderer
from rollout_cases import make_agent

from penstock.config import RolloutSection
from penstock.events import Events
from penstock.records import End, Sampling, make_rollout
from penstock.rollout import loop_watchdog
from penstock.rollout.runner import open_runner
from penstock.rollout.scheduler import run_to_end
from penstock.testing import workbench


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    for name, value in {"NOTICE_S": 0.2, "BREAK_S": 0.4, "POLL_S": 0.05}.items():
        monkeypatch.setattr(loop_watchdog, name, value)


def reward_one(ctx):
    ctx.set_reward(1.0)


class Trial:
    """Rollouts of one workflow on a real gateway: what became of them, and what was told."""

    def __init__(self, run, *replies, grade=None, count=1, **limits):
        self.told, self.attempts = [], []
        asyncio.run(self._main(run, replies, grade, count, limits))

    async def _main(self, run, replies, grade, count, limits):
        async def grade_one(ctx):
            return reward_one(ctx)

        events = Events()
        events.listen(lambda kind, fields: self.told.append((kind, fields)))
        section = RolloutSection(**{"agent_timeout_s": 20, "grader_timeout_s": 20, **limits})
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(60))
            bench = await stack.enter_async_context(workbench(engine(*replies), renderer(), serves=True))
            agent = make_agent(run, grade or grade_one)
            runner = await stack.enter_async_context(
                open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=events, limits=section)
            )
            rollouts = [make_rollout("train-0", TASK.id, place) for place in range(count)]
            await bench.pool.open_group(TASK, rollouts, seq=0)
            async with asyncio.TaskGroup() as group:
                options = {"pool": bench.pool, "sampling": Sampling(max_tokens=100), "retries": 3}
                ran = [group.create_task(run_to_end(each, TASK, runner, **options)) for each in rollouts]
            self.attempts = [await bench.pool.attempt(task.result().id) for task in ran]

    @property
    def ends(self):
        return [attempt.end for attempt in self.attempts]

    @property
    def blocked_at(self):
        return [fields["where"] for kind, fields in self.told if kind == "loop.blocked"]


def openai_client(ctx):
    from openai import OpenAI

    with OpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
        client.chat.completions.create(model="any", messages=ctx.prompt)


async def plain_client(ctx):
    openai_client(ctx)  # blocks


async def thread_result(ctx):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(openai_client, ctx).result()  # blocks


async def langchain(ctx):
    from langchain_openai import ChatOpenAI

    ChatOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, model="any").invoke(ctx.prompt)  # blocks


async def strands(ctx):
    from strands import Agent
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": ctx.base_url, "api_key": ctx.api_key}, model_id="any")
    Agent(model=model, callback_handler=None)("What is 6 times 7?")  # blocks


async def openai_agents(ctx):
    from agents import Runner, function_tool

    from penstock.integrations.openai_agents import RolloutAgent, RolloutModel, RolloutSession

    @function_tool
    async def ask(question: str) -> str:
        """Ask a colleague."""
        openai_client(ctx)  # blocks
        return "42"

    solver = RolloutAgent(name="solver", model=RolloutModel(), tools=[ask])
    await Runner.run(solver, "What is 6 times 7?", session=RolloutSession("main"))


@pytest.mark.parametrize(
    ("run", "replies"),
    [
        (plain_client, ["42"]),
        (thread_result, ["42"]),
        (langchain, ["42"]),
        (strands, ["42"]),
        (openai_agents, [call("ask", question="?")] * 2 + ["42"] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_blocking_call_is_named_and_the_rollout_is_made_again_in_a_thread(run, replies):
    trial = Trial(run, *replies)
    assert (trial.ends, trial.attempts[0].message) == ([End.COMPLETED], "")
    assert trial.attempts[0].rollout.attempt == 2
    assert trial.attempts[0].reward == 1.0
    assert trial.blocked_at[-1].startswith("test_blocked_loop.py, line")
    assert "asyncio.to_thread" in next(fields["text"] for kind, fields in trial.told if kind == "loop.blocked")
    lost = next(fields for kind, fields in trial.told if kind == "rollout.end")
    assert (lost["end"], "blocked the event loop at test_blocked_loop.py, line" in lost["message"]) == (End.LOST, True)


def test_all_rollouts_of_a_blocking_workflow_are_moved_at_once_and_their_deadline_holds():
    release = threading.Event()

    async def run(ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)
        release.wait()  # blocks

    try:
        trial = Trial(run, *["42"] * 8, count=4, agent_timeout_s=1.0)
    finally:
        release.set()
    assert trial.ends == [End.TIMEOUT] * 4
    assert len(trial.blocked_at) == 1
    assert "(`release.wait()  # blocks`)" in trial.blocked_at[0]


def test_an_agent_that_catches_everything_is_still_broken_off():
    async def run(ctx):
        try:
            openai_client(ctx)
        except BaseException:
            await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    assert [attempt.rollout.attempt for attempt in Trial(run, "42", "42").attempts] == [2]


def test_a_blocking_grader_is_run_again_in_a_thread():
    threads = []

    async def run(ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    async def grade(ctx):
        threads.append(threading.current_thread() is threading.main_thread())
        time.sleep(1.0)  # noqa: ASYNC251
        ctx.set_reward(0.5)

    trial = Trial(run, "42", grade=grade)
    assert (trial.ends, trial.attempts[0].reward, trial.attempts[0].rollout.attempt) == ([End.COMPLETED], 0.5, 1)
    assert threads == [True, False]


def test_native_code_that_keeps_the_interpreter_is_named_and_fails_its_rollout_alone(monkeypatch):
    monkeypatch.setattr(loop_watchdog, "HELD_S", 1.0)

    async def run(ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)
        if not held:
            held.append(True)
            re.match("(a+)+$", "a" * 60 + "b")  # blocks, and lets no thread run that could tell

    held = []
    trial = Trial(run, *["42"] * 4, count=3)
    assert sorted(trial.ends) == [End.AGENT_ERROR, End.COMPLETED, End.COMPLETED]
    [failed] = [attempt for attempt in trial.attempts if attempt.end == End.AGENT_ERROR]
    assert re.search(r"kept the interpreter to itself at test_blocked_loop.py, line \d+ \(`re.match", failed.message)
    assert 'set rollout.executor = "process"' in failed.message
    assert any("re.match" in where for where in trial.blocked_at), trial.blocked_at


def test_a_short_block_is_told_once_and_goes_on():
    async def run(ctx):
        time.sleep(0.3)  # noqa: ASYNC251
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    trial = Trial(run, *["42"] * 3, count=3)
    assert (trial.ends, len(trial.blocked_at)) == ([End.COMPLETED] * 3, 1)


def test_an_agent_that_awaits_is_not_told_of():
    async def run(ctx):
        await asyncio.sleep(0.5)
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    trial = Trial(run, "42")
    assert (trial.ends, trial.blocked_at, trial.attempts[0].rollout.attempt) == ([End.COMPLETED], [], 1)


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this system does not tell how long a thread waited for a core"
)
def test_time_in_which_other_programs_have_the_core_is_no_block():
    cores, spin = os.sched_getaffinity(0), [sys.executable, "-c", "while True: pass"]
    one_core = {min(cores)}
    busy = [subprocess.Popen(spin, preexec_fn=lambda: os.sched_setaffinity(0, one_core)) for _ in range(4)]
    try:
        os.sched_setaffinity(0, one_core)
        thread = threading.current_thread()
        wall, own, worked = time.monotonic(), loop_watchdog.own_time(thread), time.thread_time()
        while time.thread_time() - worked < 0.2:
            pass
        waited = time.monotonic() - wall - 0.2
        assert waited > 0.2 and loop_watchdog.own_time(thread) - own - 0.2 < waited / 2
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()
