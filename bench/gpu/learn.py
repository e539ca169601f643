"""Steps and seconds until the multiply agent's reward is 0.95: in bfloat16, in float32, and by TRL where that is installed.

Each run is a process, timed from its start; `start-up` is what passes before the first step. Where the clock is compared, seed 0
runs alone; all other runs are made beside each other, for their steps alone. `control` has a learning rate of 0: what rewards do
by chance. `nearest` is bfloat16 as it was before, without gateway and pool; see `precision.py`.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TASKS = ROOT / "examples" / "multiply" / "tasks.jsonl"
WANTED, STEPS, SEEDS = 0.95, 8, (0, 1, 2)
TIMEOUT_S = 240
SHARED = "engine.cache_tokens=65536"
"""For runs beside each other: alone, one takes a third of the GPU's memory."""
AT_ONCE = 6
ATTEMPTS = 2
"""A run beside others may fail for a port or for memory that another took at the same moment; each failure is printed."""


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


Curves = dict[str, dict[int, LearningCurve]]
"""By way, then by seed; those that failed are left out."""

BFLOAT16, FLOAT32, CONTROL = "one turn, bfloat16", "one turn, float32", "one turn, control"
TWO_TURNS, TRL = "two turns, bfloat16", "one turn, TRL with vLLM"
TIMED = (BFLOAT16, TWO_TURNS, TRL)


def ways(folder: Path) -> dict[str, Callable[..., LearningCurve]]:
    one, two = HERE / "one_turn.toml", HERE / "two_turns.toml"
    found: dict[str, Callable[..., LearningCurve]] = {
        BFLOAT16: partial(penstock, folder, one),
        FLOAT32: partial(penstock, folder, one, 'engine.dtype="float32"'),
        CONTROL: partial(penstock, folder, one, "train.lr=0"),
        TWO_TURNS: partial(penstock, folder, two),
    }
    if importlib.util.find_spec("trl") and importlib.util.find_spec("vllm"):
        found[TRL] = partial(trl, folder)
    return found


def run_beside(folder: Path) -> Curves:
    """All runs whose steps alone count, some at a time. Nothing else may be measured meanwhile."""
    jobs = [(name, run, seed) for name, run in ways(folder).items() for seed in SEEDS if seed or name not in TIMED]
    jobs = [job for job in jobs if job[0] != CONTROL or not job[2]]
    jobs.sort(key=lambda job: job[0] != TRL)  # the slowest first
    curves: Curves = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        nearest = pool.submit(_output, [sys.executable, "-m", "bench.gpu.precision", str(folder), "3", str(STEPS), "nearest"])
        started = [(name, seed, pool.submit(_measure, name, run, seed, beside=True)) for name, run, seed in jobs]
        for name, seed, running in started:
            if (curve := running.result()) is not None:
                curves.setdefault(name, {})[seed] = curve
        try:
            print(nearest.result(), end="", flush=True)
        except (subprocess.SubprocessError, OSError, ValueError) as cause:
            print(f"nearest: failed: {str(cause)[-1500:]}", flush=True)
    return curves


def main(folder: Path, beside: Curves | None = None) -> dict[str, Any]:
    curves = run_beside(folder) if beside is None else beside
    runs = ways(folder)
    if TRL not in runs:
        print("TRL with vLLM is not installed")
    for name in TIMED:
        if name in runs and (curve := _measure(name, runs[name], 0, beside=False)) is not None:
            curves.setdefault(name, {})[0] = curve
    for name, by_seed in curves.items():
        steps = [by_seed[seed].steps if seed in by_seed else "failed" for seed in SEEDS if name != CONTROL or not seed]
        counts = counted_steps(by_seed)
        print(f"learn, {name}: {WANTED} at steps {steps}, mean {fmean(counts):.2f}, median {median(counts):g}", flush=True)
    for name, other in ((BFLOAT16, FLOAT32), (BFLOAT16, TRL), (FLOAT32, TRL)):
        if name in curves and other in curves:
            print(compared(name, counted_steps(curves[name]), other, counted_steps(curves[other])), flush=True)
    ours, theirs = (curves.get(name, {}).get(0) for name in (BFLOAT16, TRL))
    if ours and theirs:
        print(f"learn: {theirs.step_s / ours.step_s:.2f} x the steps/s of TRL with vLLM", flush=True)
        print(f"learn: start-up {ours.start_s:.1f} s, TRL with vLLM {theirs.start_s:.1f} s", flush=True)
    return {name: {seed: curve._asdict() for seed, curve in by_seed.items()} for name, by_seed in curves.items()}


def counted_steps(by_seed: dict[int, LearningCurve]) -> list[int]:
    """Steps until the wanted reward by seed; one more than were made where it was not reached."""
    return [curve.steps or len(curve.rewards) + 1 for _, curve in sorted(by_seed.items())]


def compared(name: str, mine: list[int], other: str, theirs: list[int]) -> str:
    """Whether it takes at most one step more, by the means and by the medians over seeds."""
    gaps = [average(mine) - average(theirs) for average in (fmean, median)]
    held = "at most one more" if max(gaps) <= 1 else "MORE THAN ONE MORE"
    seeds = f"{len(mine)} and {len(theirs)} seeds"
    return f"learn: {name} beside {other} ({seeds}): {gaps[0]:+.2f} steps by the mean, {gaps[1]:+g} by the median: {held}"


def _measure(name: str, run: Callable[..., LearningCurve], seed: int, *, beside: bool) -> LearningCurve | None:
    for attempt in range(ATTEMPTS):
        try:
            curve = run(seed=seed, beside=beside)
        except subprocess.TimeoutExpired as late:
            print(f"{name}, seed {seed}: {late}", flush=True)
            return None
        except (OSError, ValueError, LookupError, StopIteration) as cause:
            print(f"{name}, seed {seed}: failed ({attempt + 1} of {ATTEMPTS}): {str(cause)[-1500:]}", flush=True)
        else:
            print(f"{name}, seed {seed}{' (beside others)' if beside else ''}: {curve}", flush=True)
            return curve
    return None


def penstock(model: Path, config: Path, *settings: str, seed: int, beside: bool) -> LearningCurve:
    settings = (*settings, SHARED) if beside else settings
    with tempfile.TemporaryDirectory() as folder:
        run = [f'run.folder="{folder}"', 'run.name="bench"', f"run.seed={seed}", f'model.name="{model}"', f"train.steps={STEPS}"]
        options = [word for one in (*run, *settings) for word in ("--set", one)]
        started = time.time()
        _output([sys.executable, "-m", "penstock", "train", "run", str(config), *options])
        events = [json.loads(line) for line in (Path(folder) / "bench" / "events.jsonl").read_text().splitlines()]
    first = next(event["time"] for event in events if event["kind"] == "step.start")
    steps = [event for event in events if event["kind"] == "train.step"]
    return LearningCurve(first - started, [one["reward"] for one in steps], [one["time"] - started for one in steps])


def trl(model: Path, *, seed: int, beside: bool) -> LearningCurve:
    # What vLLM compiles is kept: by each seed for itself, as two would write the same files, and by seed 0 from seed 1.
    cache = Path(tempfile.gettempdir()) / f"bench-trl-{seed or 1}"
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(cache), "MASTER_PORT": str(_free_port())}
    command = [sys.executable, str(HERE / "trl_one_turn.py"), str(model), str(TASKS), str(STEPS), str(seed), str(int(beside))]
    started = time.time()
    output = _output(command, environment)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))
    ends = [end - started for end in found["ends"]]
    return LearningCurve(found["begun"] - started, found["rewards"], ends)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _output(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Raises ValueError with the end of what it printed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise ValueError((done.stdout + done.stderr)[-1500:])
    return done.stdout
