"""Steps and seconds until the multiply agent's reward is 0.95: in bfloat16, in float32, and by TRL where that is installed.

Each run is a process, timed from its start; `start-up` is what passes before the first step. Seed 0 runs alone; the other seeds of
Penstock run beside each other, for their steps alone. `control` has a learning rate of 0: what rewards do by chance.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TASKS = ROOT / "examples" / "multiply" / "tasks.jsonl"
WANTED, STEPS, SEEDS = 0.95, 8, (0, 1, 2)
TIMEOUT_S = 240
SHARED = "engine.cache_tokens=65536"
"""For runs beside each other: alone, one takes a third of the GPU's memory."""


class LearningCurve(NamedTuple):
    start_s: float
    rewards: list[float]
    ends_s: list[float]
    """When each step ended, in seconds since the process started."""

    @property
    def steps(self) -> int | None:
        """The first step with the wanted reward, counted from 1."""
        return next((at for at, reward in enumerate(self.rewards, 1) if reward >= WANTED), None)

    @property
    def step_s(self) -> float:
        """The median time of a step; the first compiles and captures."""
        times = [end - start for start, end in zip(self.ends_s, self.ends_s[1:], strict=False)]
        return median(times) if times else float("nan")

    def __str__(self) -> str:
        curve = " ".join(f"{reward:.2f}" for reward in self.rewards)
        reached = "not reached" if self.steps is None else f"step {self.steps}, {self.ends_s[self.steps - 1]:.1f} s"
        return f"{curve}; {WANTED} at {reached}; start-up {self.start_s:.1f} s, {self.step_s:.2f} s a step"


def main(folder: Path) -> None:
    one, two = HERE / "one_turn.toml", HERE / "two_turns.toml"
    ways: dict[str, Callable[..., LearningCurve]] = {
        "one turn, bfloat16": partial(penstock, folder, one),
        "one turn, float32": partial(penstock, folder, one, 'engine.dtype="float32"'),
        "one turn, control": partial(penstock, folder, one, "train.lr=0"),
        "two turns, bfloat16": partial(penstock, folder, two),
    }
    timed = {name: _measure(name, run, 0) for name, run in ways.items()}
    with ThreadPoolExecutor() as pool:
        more = {
            name: list(pool.map(partial(_measure, name, run), SEEDS[1:])) for name, run in ways.items() if "control" not in name
        }
    if importlib.util.find_spec("trl") and importlib.util.find_spec("vllm"):
        name = "one turn, TRL with vLLM"  # one after the other: vLLM fails if memory is freed by others while it starts
        timed[name], *more[name] = (_measure(name, partial(trl, folder), seed) for seed in SEEDS)
    else:
        print("TRL with vLLM is not installed")
    for name, first in timed.items():
        steps = [curve and curve.steps for curve in (first, *more.get(name, []))]
        print(f"learn, {name}: {WANTED} at steps {steps}, {first.step_s if first else float('nan'):.2f} s a step", flush=True)
    ours, theirs = timed["one turn, bfloat16"], timed.get("one turn, TRL with vLLM")
    if ours and theirs:
        print(f"learn: {theirs.step_s / ours.step_s:.2f} x the steps/s of TRL with vLLM")


def _measure(name: str, run: Callable[..., LearningCurve], seed: int) -> LearningCurve | None:
    try:
        curve = run(seed=seed)
    except (subprocess.SubprocessError, OSError, ValueError) as cause:
        print(f"{name}, seed {seed}: failed: {str(cause)[-1500:]}", flush=True)
        return None
    print(f"{name}, seed {seed}: {curve}", flush=True)
    return curve


def penstock(model: Path, config: Path, *settings: str, seed: int) -> LearningCurve:
    with tempfile.TemporaryDirectory() as folder:
        run = [f'run.folder="{folder}"', 'run.name="bench"', f"run.seed={seed}", f'model.name="{model}"', f"train.steps={STEPS}"]
        options = [word for one in (*run, *settings) for word in ("--set", one)]
        started = time.time()
        _output([sys.executable, "-m", "penstock", "train", "run", str(config), *options])
        events = [json.loads(line) for line in (Path(folder) / "bench" / "events.jsonl").read_text().splitlines()]
    first = next(event["time"] for event in events if event["kind"] == "step.start")
    steps = [event for event in events if event["kind"] == "train.step"]
    return LearningCurve(first - started, [one["reward"] for one in steps], [one["time"] - started for one in steps])


def trl(model: Path, seed: int) -> LearningCurve:
    started = time.time()
    output = _output([sys.executable, str(HERE / "trl_one_turn.py"), str(model), str(TASKS), str(STEPS), str(seed)])
    found = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))
    ends = [end - started for end in found["ends"]]
    return LearningCurve(found["begun"] - started, found["rewards"], ends)


def _output(command: list[str]) -> str:
    """Raises ValueError with the end of what it printed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, check=False)
    if done.returncode:
        raise ValueError((done.stdout + done.stderr)[-1500:])
    return done.stdout
