"""Agents that block their event loop: the line is reported, calls are answered, deadlines hold."""

import asyncio
import contextlib
import os
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
from penstock.rollout import author_tasks
from penstock.rollout.runner import open_runner
from penstock.rollout.scheduler import run_to_end
from penstock.testing import workbench


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    for name, value in {"NOTICE_S": 0.2, "BREAK_S": 0.4, "POLL_S": 0.05}.items():
        monkeypatch.setattr(author_tasks, name, value)


def reward_one(ctx):
    ctx.set_reward(1.0)


class Trial:
    """Rollouts of one workflow on a real gateway: what became of them, and what was reported."""

    def __init__(self, run, *replies, grade=None, count=1, **limits):
        self.reported, self.attempts = [], []
        asyncio.run(self._main(run, replies, grade, count, limits))

    async def _main(self, run, replies, grade, count, limits):
        async def grade_one(ctx):
            return reward_one(ctx)

        events = Events()
        events.listen(lambda kind, fields: self.reported.append((kind, fields)))
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
            self.attempts = [await bench.pool.rollout(task.result().id) for task in ran]

    @property
    def ends(self):
        return [attempt.end for attempt in self.attempts]

    @property
    def blocked_at(self):
        return [fields["where"] for kind, fields in self.reported if kind == "loop.blocked"]


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
        (openai_agents, [call("ask", question="?"), "42", "42"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocking_call_is_answered(run, replies):
    trial = Trial(run, *replies)
    assert (trial.ends, trial.attempts[0].message) == ([End.COMPLETED], "")
    assert (trial.attempts[0].ref.attempt, trial.attempts[0].reward) == (1, 1.0)


def test_blocked_rollouts_move_to_threads_and_keep_deadlines():
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


def test_blocking_grader_runs_again_in_a_thread():
    threads, released = [], threading.Event()

    async def run(ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    async def grade(ctx):
        threads.append(threading.current_thread())
        if len(threads) == 1:
            released.wait()  # blocks
        ctx.set_reward(0.5)

    try:
        trial = Trial(run, "42", grade=grade)
    finally:
        released.set()
    assert (trial.ends, trial.attempts[0].reward, trial.attempts[0].ref.attempt) == ([End.COMPLETED], 0.5, 1)
    assert len(set(threads)) == 2
    assert "asyncio.to_thread" in next(fields["text"] for kind, fields in trial.reported if kind == "loop.blocked")


def test_exit_in_a_child_task_ends_its_rollout_alone():
    async def leave():
        sys.exit(3)

    async def run(ctx):
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)
        if ctx.prompt and not left:
            left.append(True)
            await asyncio.create_task(leave())

    left = []
    assert sorted(Trial(run, *["42"] * 3, count=3).ends) == [End.AGENT_ERROR, End.COMPLETED, End.COMPLETED]


def test_short_block_is_reported_once():
    async def run(ctx):
        time.sleep(0.3)  # noqa: ASYNC251
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    trial = Trial(run, "42")
    assert (trial.ends, sum("sleep" in where for where in trial.blocked_at)) == ([End.COMPLETED], 1)


def test_awaiting_agent_is_not_reported():
    async def run(ctx):
        await asyncio.sleep(0.5)
        await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)

    trial = Trial(run, "42")
    assert (trial.ends, trial.blocked_at, trial.attempts[0].ref.attempt) == ([End.COMPLETED], [], 1)


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this system does not tell how long a thread waited for a core"
)
def test_time_in_which_other_programs_have_core_is_no_block():
    cores, spin = os.sched_getaffinity(0), [sys.executable, "-c", "while True: pass"]
    one_core = {min(cores)}
    busy = [subprocess.Popen(spin, preexec_fn=lambda: os.sched_setaffinity(0, one_core)) for _ in range(4)]
    try:
        os.sched_setaffinity(0, one_core)
        thread = threading.current_thread()
        wall, own, worked = time.monotonic(), author_tasks.own_time(thread), time.thread_time()
        while time.thread_time() - worked < 0.2:
            pass
        waited = time.monotonic() - wall - 0.2
        assert waited > 0.2 and author_tasks.own_time(thread) - own - 0.2 < waited / 2
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()
