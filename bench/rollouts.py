"""Rollouts of an OpenAI Agents workflow through our runner, over the same workflow on the unmodified SDK and the same endpoint.

The workflow makes three calls: a tool, a tool, an answer. The gateway is a process of its own, with an engine that samples what is
written beforehand; for both it records every call in SQLite before it answers. The SDK runs the agent alone: no session, no
tracing, one client. Ours adds what makes it a rollout: its context, its session, the recorded attempt read back, a grader, an end
on disk. First 1,000 of each run at once, to see whether any is lost or mixed up; then the two take turns with fewer, and each ratio
is of neighbours. Processor time is that of the process which runs the agents.
"""

import argparse
import asyncio
import gc
import re
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import orjson
import psutil
from agents import Agent as PlainAgent
from agents import OpenAIChatCompletionsModel, RunConfig, TResponseInputItem, function_tool
from agents import Runner as AgentsRunner
from openai import AsyncOpenAI

from penstock import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, Grader, GraderConfig, GraderContext
from penstock.chat.renderer import Renderer
from penstock.config import RolloutSection
from penstock.events import Events
from penstock.gateway import Gateway, GatewayLimits
from penstock.gateway.auth import GatewayTokens
from penstock.integrations.openai_agents import RolloutAgent, RolloutModel, RolloutSession
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, RolloutRef, Sampling, Task, make_rollout
from penstock.rollout.runner import Runner, open_runner
from penstock.sdk.discovery import Agent
from penstock.testing import ScriptedEngine, write_tokenizer

CROWD, ROLLOUTS, REPETITIONS = 1000, 200, 4
CALLS = 3
SECRET = b"a secret for benchmarks"
INSTRUCTIONS = "Multiply with the tool, twice, then answer."
SAMPLING = Sampling(max_tokens=256)


@function_tool
def multiply(a: int, b: int) -> int:
    return a * b


class Multiply(AgentWorkflow[AgentWorkflowConfig]):
    """The workflow as an author writes it."""

    async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> None:
        agent = RolloutAgent[None](name="solver", instructions=INSTRUCTIONS, model=RolloutModel(), tools=[multiply])
        await AgentsRunner.run(agent, cast(list[TResponseInputItem], ctx.prompt), session=RolloutSession(name="solver"))


class Answered(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(float(ctx.label == ctx.sample.messages[-1]["content"][0]["text"]))


class Session(NamedTuple):
    """A rollout's way into a gateway of another process."""

    token: str
    base_url: str
    rollout: RolloutRef
    sampling: Sampling
    flow_token: str = ""

    def branch_problem(self, *, ended: bool) -> str:
        return ""


class Remote:
    """That gateway, as the runner sees it: it knows a rollout by its token, so there is nothing to open or close."""

    app = None

    def __init__(self, base_url: str) -> None:
        self._tokens, self._base_url = GatewayTokens(SECRET), base_url

    def open(self, rollout: RolloutRef, sampling: Sampling, *, fresh: bool) -> Session:
        return Session(self._tokens.model(rollout.id), self._base_url, rollout, sampling)

    def close(self, rollout_id: str) -> None:
        pass


class Case(NamedTuple):
    """One rollout and the number that every reply to it repeats."""

    number: str
    task: Task
    rollout: RolloutRef


class Speed(NamedTuple):
    """How fast a number of rollouts ran at once."""

    per_s: float
    cpu_ms: float
    """Of this process, for each."""


class Round(NamedTuple):
    """What one repetition came to."""

    ours: Speed
    plain: Speed
    lost: int
    """Rollouts, of either way, that did not end well with all their calls recorded."""
    mixed: int
    """Rollouts, of either way, among whose recorded calls is one of another."""
    memory: int
    """Bytes of this process after it."""


class Bench:
    """Both ways to run the workflow, on one gateway."""

    def __init__(self, runner: Runner, pool: Pool, gateway: Remote, plain: AsyncOpenAI) -> None:
        self._runner, self._pool, self._gateway, self._plain = runner, pool, gateway, plain
        self._cases = 0

    async def repeat(self, count: int, *, ours_first: bool) -> Round:
        """`count` rollouts at once in each way, one way after the other."""
        speeds: dict[bool, Speed] = {}
        lost = mixed = 0
        for ours in (ours_first, not ours_first):
            cases = [await self._open() for _ in range(count)]
            speeds[ours] = await clock([self._ours(case) if ours else self._unmodified(case) for case in cases])
            for case in cases:
                attempt = await self._pool.rollout(case.rollout.id)
                told = [re.findall(r"case-(\d+)", str(step.message)) for step in attempt.steps]
                lost += len(told) != CALLS or (ours and (attempt.end is not End.COMPLETED or attempt.reward != 1.0))
                names = {step.transcript for step in attempt.steps}
                mixed += any(each != [case.number] for each in told) or names != {"solver" if ours else "main"}
        gc.collect()
        return Round(speeds[True], speeds[False], lost, mixed, psutil.Process().memory_info().rss)

    async def _open(self) -> Case:
        self._cases += 1
        number = str(self._cases)
        prompt = ({"role": "user", "content": f"This is case-{number} ."},)
        task = Task(id=f"t{number}", prompt=prompt, label=f"Done with case-{number}")
        case = Case(number, task, make_rollout(f"train-{number}", task.id, 0))
        await self._pool.open_group(task, [case.rollout], seq=self._cases)
        return case

    async def _ours(self, case: Case) -> None:
        await self._runner.run(case.rollout, case.task, SAMPLING)

    async def _unmodified(self, case: Case) -> None:
        client = self._plain.copy(api_key=self._gateway.open(case.rollout, SAMPLING, fresh=True).token)
        model = OpenAIChatCompletionsModel("any", client)
        agent = PlainAgent[None](name="solver", instructions=INSTRUCTIONS, model=model, tools=[multiply])
        prompt = cast(list[TResponseInputItem], list(case.task.prompt))
        result = await AgentsRunner.run(agent, prompt, run_config=RunConfig(tracing_disabled=True))
        assert result.final_output == case.task.label


async def clock(runs: Sequence[Coroutine[Any, Any, None]]) -> Speed:
    """Run all of them together."""
    start, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(run)
    return Speed(len(runs) / (time.perf_counter() - start), (time.process_time() - cpu) / len(runs) * 1e3)


async def serve(folder: Path) -> None:
    """The gateway, until it is killed."""
    renderer = Renderer.load(write_tokenizer(folder / "model"))
    decode = renderer.tokenizer.decode

    def reply(ids: tuple[int, ...]) -> str:
        text = decode(ids)
        number, turn = re.findall(r"case-(\d+)", text)[0], text.count("assistant\n")
        call = {"name": "multiply", "arguments": {"a": turn, "b": 2}}
        asks = f"For case-{number}:\n<tool_call>\n{orjson.dumps(call).decode()}\n</tool_call>"
        return asks if turn < CALLS else f"Done with case-{number}"

    engine = ScriptedEngine(reply, renderer.tokenizer, chunk=1 << 10)
    pool: Pool = POOLS.load("sqlite")(folder)
    given: dict[str, Any] = {"sampling": {"train": SAMPLING}, "limits": GatewayLimits(calls_per_s=1e9)}
    async with Gateway(engine, renderer, pool, secret=SECRET, **given) as gateway:
        print(gateway.base_url, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def gateway_process(folder: Path) -> AsyncGenerator[str, None]:
    command = [sys.executable, "-m", "bench.rollouts", "--serve", str(folder)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        yield (await asyncio.wait_for(server.stdout.readline(), 60)).decode().strip()
    finally:
        server.kill()
        await server.wait()


async def measure(folder: Path) -> list[Round]:
    """The crowd, then the repetitions."""
    agent = Agent(
        entry=Path(__file__),
        workflow=Multiply,
        workflow_config=AgentWorkflowConfig(name="multiply"),
        grader=Answered,
        grader_config=GraderConfig(name="answered"),
    )
    limits = RolloutSection(agent_timeout_s=300, grader_timeout_s=300)
    async with AsyncExitStack() as stack:
        base_url = await stack.enter_async_context(gateway_process(folder))
        pool: Pool = POOLS.load("sqlite")(folder)
        stack.push_async_callback(pool.close)
        gateway = Remote(base_url)
        opened = open_runner(agent, gateway=gateway, pool=pool, events=Events(), limits=limits)
        runner = await stack.enter_async_context(opened)
        plain = await stack.enter_async_context(AsyncOpenAI(api_key="each rollout has its own", base_url=base_url, timeout=600))
        bench = Bench(runner, pool, gateway, plain)
        sizes = [CROWD] + [ROLLOUTS] * REPETITIONS
        return [await bench.repeat(size, ours_first=bool(place % 2)) for place, size in enumerate(sizes)]


def figures(crowd: Round, *rounds: Round) -> dict[str, float | int]:
    """What the repetitions come to. Memory is what the second half of them added: nothing, where rollouts leave nothing behind."""
    half = len(rounds) // 2
    added = (rounds[-1].memory - rounds[half - 1].memory) / (len(rounds) - half) / (2 * ROLLOUTS)
    return {
        "rollouts_per_s": median(each.ours.per_s for each in rounds),
        "unmodified_per_s": median(each.plain.per_s for each in rounds),
        "over_unmodified": median(each.ours.per_s / each.plain.per_s for each in rounds),
        "cpu_ms": median(each.ours.cpu_ms for each in rounds),
        "cpu_over_unmodified": median(each.ours.cpu_ms / each.plain.cpu_ms for each in rounds),
        "crowd.rollouts_per_s": crowd.ours.per_s,
        "crowd.over_unmodified": crowd.ours.per_s / crowd.plain.per_s,
        "crowd.cpu_over_unmodified": crowd.ours.cpu_ms / crowd.plain.cpu_ms,
        "lost": sum(each.lost for each in (crowd, *rounds)),
        "mixed": sum(each.mixed for each in (crowd, *rounds)),
        "kb_per_rollout": added / 1024,
    }


def main() -> None:
    """Print the figures, or one JSON object with `--json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.rollouts", description="Rollouts against the unmodified SDK.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = figures(*asyncio.run(measure(Path(folder))))
    if options.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return
    print(
        f"rollouts: {found['rollouts_per_s']:.0f}/s with {ROLLOUTS} at once, {CALLS} calls each, {found['cpu_ms']:.0f} ms of a core"
    )
    print(f"rollouts: {found['over_unmodified']:.2f} of the unmodified SDK's {found['unmodified_per_s']:.0f}/s", end="")
    print(f", {found['crowd.over_unmodified']:.2f} with {CROWD} at once")
    print(f"rollouts: {found['lost']} lost, {found['mixed']} with a call of another, {found['kb_per_rollout']:.2f} KB kept of each")


if __name__ == "__main__":
    main()
