"""`eval run` with 256 rollouts at once, over the bare asyncio loop on the same engine: `python -m bench evals`.

The engine takes 100 ms for a call: in one case for any number of calls at once, so that the ideal is 2,560 rollouts of one call a
second, and how near to it one process comes is decided by the processor time of each; in the other in 32 slots, as many as
`engine.slots` has by default, where 320 a second are what there is. Beside each other, in the same run and the same process:
(a) the ideal: rollouts at once, or slots where there are fewer, over the engine's time
(b) a bare loop that awaits `engine.generate`: no agent, no HTTP, nothing recorded, no grade
(c) the same agent's client alone, against a server in another process that answers alike and does nothing else
ours: `evaluate`, from the first rollout's start to the last one's end on disk; agent, gateway, pool, grader and events included
Two agents: one on the `openai` client that a workflow is given, one on bare aiohttp, the least that an agent in Python can spend.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import orjson
from openai import AsyncOpenAI, DefaultAioHttpClient

from bench.gateway.servers import serving
from bench.scale_engine import SAID, TimedEngine, open_tenth
from bench.scale_rollouts import Speed, clock, closed_loop
from penstock.config import EngineSection, RunConfig, make_config
from penstock.evals.run import evaluate, evaluation_config
from penstock.records import Sampling, Task
from penstock.rollout.executors.base import read_section
from penstock.run.inputs import Inputs
from penstock.sdk.discovery import open_agent
from penstock.system.processes import relax_gc
from penstock.testing import write_tokenizer

AT_ONCE, WAIT_S = 256, 0.1
ROLLOUTS, REPETITIONS = 2048, 3
AGENTS = ("openai_client", "bare_http")
SLOTS = {"100 ms": 4096, "100 ms, 32 slots": 32}
"""Calls that the engine serves at once, by what it is called."""
ASKED = {"role": "user", "content": "Answer what is asked in one sentence, please: which number is it?"}
SAMPLING = Sampling(max_tokens=256)


class Ours(NamedTuple):
    """How fast an evaluation was."""

    per_s: float
    cpu_ms: float
    crowd_per_s: float
    """Past the first 256: the attempts that go ahead of the others, and what each process loads with them, left out."""


class Round(NamedTuple):
    ours: Ours
    bare: Speed
    client: Speed


class Clock:
    """Listens to an evaluation."""

    def __init__(self, total: int) -> None:
        self.total, self.ended, self.first = total, 0, min(AT_ONCE, total // 2)
        self.first_s = self.crowd_s = self.last_s = self.cpu_s = 0.0

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "eval.begin":
            self.first_s, self.cpu_s = time.perf_counter(), -time.process_time()
        elif kind == "rollout.end":
            self.last_s = time.perf_counter()
            self.ended += 1
            if self.ended == self.first:
                self.crowd_s = self.last_s
            if self.ended == self.total:
                self.cpu_s += time.process_time()


def config_of(folder: Path, agent: str, slots: int) -> RunConfig:
    """An evaluation of one attempt at each task."""
    tree = {
        "run": {"name": agent, "folder": str(folder)},
        "model": {"name": "scripted"},
        "agent": {"entry": str(Path(__file__).parent / "eval_agents" / f"{agent}.py")},
        "dataset": {"train": str(folder / "tasks.jsonl")},
        "rollout": {"concurrency": AT_ONCE, "agent_timeout_s": 600, "grader_timeout_s": 600},
        "engine": {"name": "bench.scale_engine:open_tenth", "slots": slots},
        "gateway": {"rollout_calls_per_s": 1e9},
    }
    return evaluation_config(make_config(tree, "the benchmark"))


async def ours(folder: Path, model: Path, agent: str, slots: int, total: int) -> Ours:
    """A whole evaluation, in a folder of its own."""
    (folder / "tasks.jsonl").write_text("{}\n")
    config, listener = config_of(folder, agent, slots), Clock(total)
    inputs = Inputs(
        tasks=[Task(id=f"t{number}", prompt=(ASKED,)) for number in range(total)],
        heldout=[],
        agent=open_agent(config.agent, config.workflow, config.grader),
        executor=read_section(config.rollout.executor, config.executor),
        model="scripted",
        folder=model,
    )
    found = await evaluate(config, inputs, listener=listener, stop=asyncio.Event())
    if found.outcome.ends != {"completed": total} or found.outcome.spent.steps != total:
        raise SystemExit(f"rollouts were lost: {found.outcome}")
    crowd_per_s = (total - listener.first) / (listener.last_s - listener.crowd_s)
    return Ours(total / (listener.last_s - listener.first_s), listener.cpu_s / total * 1e3, crowd_per_s)


async def bare(engine: TimedEngine, total: int) -> Speed:
    """(b): the engine alone."""
    prompt = engine.tokenizer.encode(str(ASKED))

    async def rollout() -> None:
        async with aclosing(engine.generate(prompt, SAMPLING)) as chunks:
            async for _ in chunks:
                pass

    return await clock(lambda: closed_loop(rollout, total, AT_ONCE), total, alone=True)


async def client_alone(url: str, agent: str, total: int) -> Speed:
    """(c): the agent's client, and nothing of ours."""
    seed = int(WAIT_S * 1000) * 1000
    if agent == "bare_http":
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await _clocked(lambda: _post(session, url, seed), total)
    async with AsyncOpenAI(api_key="none", base_url=url, http_client=DefaultAioHttpClient()) as client:
        return await _clocked(lambda: client.chat.completions.create(model="policy", messages=[ASKED], seed=seed), total)  # type: ignore[list-item]


async def _post(session: aiohttp.ClientSession, url: str, seed: int) -> None:
    body = orjson.dumps({"model": "policy", "messages": [ASKED], "seed": seed})
    async with session.post(f"{url}/chat/completions", data=body, headers={"content-type": "application/json"}) as response:
        orjson.loads(await response.read())


async def _clocked(call: Callable[[], Awaitable[Any]], total: int) -> Speed:
    async def rollout() -> None:
        await call()

    return await clock(lambda: closed_loop(rollout, total, AT_ONCE), total, alone=True)


async def measure(agent: str, slots: int, *, quick: bool) -> list[Round]:
    """Repetitions, ours beside its neighbours; the client alone has a server without such slots."""
    total, rounds = min(ROLLOUTS, 32 * slots) // (4 if quick else 1), list[Round]()
    with tempfile.TemporaryDirectory() as name:
        model = write_tokenizer(Path(name) / "model", corpus=[SAID * 40, str(ASKED) * 40], vocab_size=400)
        engine = open_tenth(model, name="scripted", section=EngineSection(slots=slots), seed=0)
        async with serving("upstream") as (upstream, _):
            await client_alone(upstream, agent, AT_ONCE)  # first calls are slow, whoever makes them
            for number in range(1 if quick else REPETITIONS):
                folder = Path(name) / str(number)
                folder.mkdir()
                own = await ours(folder, model, agent, slots, total)
                beside = min(total, ROLLOUTS)
                rounds.append(Round(own, await bare(engine, beside), await client_alone(upstream, agent, beside)))
    return rounds


def figures(rounds: list[Round], slots: int) -> dict[str, float]:
    """The middle of the repetitions."""
    ideal = min(AT_ONCE, slots) / WAIT_S
    return {
        "rollouts_per_s": median(each.ours.per_s for each in rounds),
        "cpu_ms": median(each.ours.cpu_ms for each in rounds),
        "over_ideal": median(each.ours.per_s for each in rounds) / ideal,
        "over_bare_loop": median(each.ours.per_s / each.bare.per_s for each in rounds),
        "crowd_over_bare_loop": median(each.ours.crowd_per_s / each.bare.per_s for each in rounds),
        "bare_per_s": median(each.bare.per_s for each in rounds),
        "over_client_alone": median(each.ours.per_s / each.client.per_s for each in rounds),
        "client_per_s": median(each.client.per_s for each in rounds),
        "client_cpu_ms": median(each.client.cpu_ms for each in rounds),
    }


def main() -> None:
    """Print the figures, or one JSON object with `--json`."""
    relax_gc()  # as the command does
    parser = argparse.ArgumentParser(prog="python -m bench.evals", description="Evaluations with 256 rollouts at once.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer rollouts: a look, not a measurement")
    options, _ = parser.parse_known_args()

    def figured(agent: str, slots: int) -> dict[str, float]:
        return figures(asyncio.run(measure(agent, slots, quick=options.quick)), slots)

    found = {agent: {engine: figured(agent, slots) for engine, slots in SLOTS.items()} for agent in AGENTS}
    if options.json:
        print(orjson.dumps({"cores": os.cpu_count(), **found}, option=orjson.OPT_INDENT_2).decode())
        return
    print(f"evals: one process on {os.cpu_count()} cores")
    for agent, engines in found.items():
        for engine, own in engines.items():
            print(f"evals: {agent}, engine of {engine}: {own['rollouts_per_s']:.0f} rollouts/s with {AT_ONCE} at once", end="")
            print(f", {own['cpu_ms']:.2f} ms of a core each (the client alone: {own['client_cpu_ms']:.2f})")
            print(f"  {own['over_bare_loop']:.2f} of the bare loop's {own['bare_per_s']:.0f}/s (aim: 0.9)", end="")
            print(f", {own['crowd_over_bare_loop']:.2f} past the first {AT_ONCE}", end="")
            print(f", {own['over_client_alone']:.2f} of the client alone's {own['client_per_s']:.0f}/s")


if __name__ == "__main__":
    main()
