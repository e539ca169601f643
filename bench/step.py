"""What a training step takes beside the model: 32 rollouts of one turn, with an engine that answers at once.

Scheduler, runner, agent, gateway, pool on disk and grader are opened as a training run opens them. A step lasts from the moment at
which the groups before it count as trained until its own are claimed. `client` is the same agent on its client against a server of
another process that does nothing else: what the agent itself takes, and none of ours. Two agents are measured, one on the
`openai` client, which takes most of its step, and one that posts a body: with it, a step is nearly all ours.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import orjson

from bench.bare_agent import post
from bench.gateway.servers import serving
from bench.gpu.one_turn import ask
from penstock.config import RunConfig
from penstock.events import Events
from penstock.pool.base import Pool
from penstock.pool.sqlite import SqlitePool
from penstock.records import Lease, Task
from penstock.rollout.executors.base import read_section
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.sdk.clients import Clients
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import open_agent
from penstock.sdk.routing import RolloutContext
from penstock.system.processes import relax_gc
from penstock.testing import write_tokenizer
from penstock.train.resources import open_rollouts

GROUPS, SIZE = 4, 8
STEPS, FIRST = 60, 10
"""Steps that are measured, and those before them."""
HERE = Path(__file__).parent
AGENTS = {"openai": HERE / "gpu" / "one_turn.py", "bare": HERE / "bare_agent.py"}
TASKS = Path(__file__).parents[1] / "examples" / "multiply" / "tasks.jsonl"


class StepTime(NamedTuple):
    """Milliseconds of a step: on the clock, of processor time, and of that in the event loop, which all rollouts wait for."""

    wall_ms: float
    cpu_ms: float
    loop_ms: float


def config_of(folder: Path, agent: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "step", "folder": folder},
            "model": {"name": "scripted"},
            "agent": {"entry": agent},
            "dataset": {"train": TASKS},
            "rollout": {"group_size": SIZE, "groups_per_step": GROUPS, "concurrency": GROUPS * SIZE},
            "engine": {"name": "bench.scale_engine:open_quick", "slots": GROUPS * SIZE},
            "train": {"steps": FIRST + STEPS},
        }
    )


async def ours(folder: Path, agent: Path) -> list[StepTime]:
    config = config_of(folder, agent)
    path = folder / "step"
    path.mkdir()
    tasks = load_tasks(TASKS)
    inputs = Inputs(
        tasks=tasks,
        heldout=[],
        agent=open_agent(config.agent, config.workflow, config.grader),
        executor=read_section(config.rollout.executor, config.executor),
        model="scripted",
        folder=write_tokenizer(folder / "model", corpus=[str(task.prompt) for task in tasks], vocab_size=400),
    )
    pool = SqlitePool(path)
    times: list[StepTime] = []
    try:
        with Events(path / "events.jsonl") as events:
            async with (
                open_rollouts(config, inputs, RunFolder(path, resumed=False), events, pool) as rollouts,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(rollouts.run())
                clock = StepClock()
                for step in range(FIRST + STEPS):
                    lease = await claim(pool)
                    times.append(clock.lap())
                    assert sum(len(one.rollouts) for one in lease.groups) == GROUPS * SIZE
                    await pool.ack(lease.id, 0)
                    clock.lap()
                    rollouts.advance(step + 1)
    finally:
        await pool.close()
    return times[FIRST:]


async def claim(pool: Pool) -> Lease:
    while True:
        position = await pool.position()
        if lease := await pool.claim(GROUPS, version=0, max_staleness=0, lease_s=600.0):
            return lease
        await pool.wait(position, timeout_s=60.0)


async def client_alone(url: str, agent: str) -> list[StepTime]:
    clients, tasks = Clients(), load_tasks(TASKS)
    times: list[StepTime] = []

    async def rollout(task: Task) -> None:
        context = RolloutContext(base_url=url, api_key="none", clients=clients)
        await (post(context, list(task.prompt)) if agent == "bare" else ask(context.openai(), list(task.prompt)))

    try:
        clock = StepClock()
        for step in range(FIRST + STEPS):
            async with asyncio.TaskGroup() as group:
                for place in range(GROUPS * SIZE):
                    group.create_task(rollout(tasks[(step * GROUPS + place // SIZE) % len(tasks)]))
            times.append(clock.lap())
    finally:
        await clients.close()
    return times[FIRST:]


class StepClock:
    def __init__(self) -> None:
        self._clocks: tuple[Callable[[], float], ...] = (time.perf_counter, time.process_time, time.thread_time)
        self._last = [clock() for clock in self._clocks]

    def lap(self) -> StepTime:
        before, self._last = self._last, [clock() for clock in self._clocks]
        return StepTime(*((now - then) * 1e3 for now, then in zip(self._last, before, strict=True)))


def middle(times: list[StepTime], kind: str) -> float:
    return median(getattr(one, kind) for one in times)


async def measure(folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    async with serving("upstream") as (url, _):
        for agent, entry in AGENTS.items():
            place = folder / agent
            place.mkdir()
            times = {"client": await client_alone(url, agent), "step": await ours(place, entry)}
            found[agent] = {f"{name}_{kind}": middle(each, kind) for name, each in times.items() for kind in StepTime._fields}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description="A step of 32 short rollouts, without the model.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options, _ = parser.parse_known_args()
    relax_gc()  # as `penstock` does
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    if options.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return
    for agent, times in found.items():
        for name, what in (("step", f"{GROUPS * SIZE} rollouts of one turn"), ("client", "the client alone")):
            wall, cpu, loop = (times[f"{name}_{kind}"] for kind in StepTime._fields)
            print(f"step, {agent}: {what}: {wall:.0f} ms, {cpu:.0f} ms of processor time, {loop:.0f} ms of it in the event loop")
        mine = {kind: times[f"step_{kind}"] - times[f"client_{kind}"] for kind in StepTime._fields}
        ratio = times["step_wall_ms"] / times["client_wall_ms"]
        wall, loop = mine["wall_ms"], mine["loop_ms"]
        print(f"step, {agent}: ours: {wall:.0f} ms, {loop:.0f} ms of it in the event loop; {ratio:.2f} x the client alone")


if __name__ == "__main__":
    main()
