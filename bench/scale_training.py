"""Asynchronous over synchronous training, with agents of uneven length: the whole loop on the tiny policy, twice.

Both runs have the same tasks, waits, learner, engine and number of rollouts at once; they differ in `rollout.max_staleness` alone.
A step trains 4 groups of 8. The tool of a rollout takes a log-normal time, so that the slowest of 32 takes about ten times as long
as the middle one: synchronous steps wait for it, asynchronous ones train what is ready. Throughput is of trained groups, from the
first step's start to the last one's end; what was dropped as too old was work for nothing and is told.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.scale_agents.waiting import MEDIAN_S, SIGMA
from penstock.config import RunConfig
from penstock.run.inputs import read_inputs
from penstock.train.trainer import train

GROUPS, SIZE, AT_ONCE = 4, 8, 64
STALENESS = (0, 1, 4, 8)
"""0 is synchronous: the first, which the others are held against."""


class Trained(NamedTuple):
    staleness: int
    steps_per_s: float
    seconds: float
    stale: int
    """Groups that became too old and were made up for."""
    age: float
    """Of trained tokens, in versions: the mean."""
    reward: float
    """Mean over its second half: that it learns all the same."""


def config_of(folder: Path, *, staleness: int, steps: int) -> RunConfig:
    """A run of the tiny policy."""
    return RunConfig.model_validate(
        {
            "run": {"name": f"staleness{staleness}", "folder": folder},
            "model": {"name": "tiny"},
            "agent": {"entry": Path(__file__).parent / "scale_agents" / "waiting.py"},
            "dataset": {"train": folder / "tasks.jsonl"},
            "rollout": {"group_size": SIZE, "groups_per_step": GROUPS, "concurrency": AT_ONCE, "max_staleness": staleness},
            "sampling": {"max_tokens": 30},
            "train": {"steps": steps, "lr": 6e-4, "checkpoint_every": steps},
        }
    )


def measure(folder: Path, *, quick: bool) -> list[Trained]:
    """Every staleness, one run after the other."""
    rows = [{"prompt": f"{a}*{b}", "label": str(a * b)} for a in range(2, 10) for b in range(2, 10) if 9 < a * b < 100]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = 8 if quick else 24
    return [asyncio.run(trained(config_of(folder, staleness=staleness, steps=steps))) for staleness in STALENESS]


async def trained(config: RunConfig) -> Trained:
    """What one run came to."""
    entries: list[dict[str, Any]] = []
    times: list[float] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind in ("step.start", "train.step"):
            times.append(time.perf_counter())
        if kind == "train.step":
            entries.append(fields)

    await train(config, read_inputs(config, listen), listener=listen, stop=asyncio.Event())
    seconds = times[-1] - times[0]
    late = entries[len(entries) // 2 :]
    return Trained(
        config.rollout.max_staleness,
        len(entries) / seconds,
        seconds,
        sum(entry["groups_stale"] for entry in entries),
        sum(entry["staleness"] for entry in entries) / len(entries),
        sum(entry["reward"] for entry in late) / len(late),
    )


def said(runs: list[Trained]) -> list[str]:
    """The figures in words."""
    first = runs[0]
    lines = [
        f"training: agents wait {MEDIAN_S} s in the middle (log-normal, sigma {SIGMA}), {GROUPS} x {SIZE} rollouts a step, "
        f"{AT_ONCE} at once; synchronous: {first.steps_per_s:.2f} steps/s, reward {first.reward:.2f}"
    ]
    for one in runs[1:]:
        times = one.steps_per_s / first.steps_per_s
        lines.append(
            f"training: max_staleness {one.staleness}: {times:.2f} x synchronous ({one.steps_per_s:.2f} steps/s), "
            f"tokens {one.age:.1f} versions old, {one.stale} groups dropped as too old, reward {one.reward:.2f}"
        )
    return lines
