"""Every advantage and every loss on two tasks over several seeds: what each learnt, and what it cost.

    python -m bench.algorithms MODEL_FOLDER [--at-once 8] [--seeds 3] [--steps 10] [--limit-s 480] [--only NAME,…] [--json FILE]

Losses take two updates a step, so that their ratios differ from 1. `control` has a learning rate of 0. The teacher of `distill` is
what grpo made of the same policy on the same task with another seed, trained first, in the same process. Runs are made beside each
other, several in each process: seconds are those of a shared GPU, for comparison with each other alone. What is not done by the
limit is told as missing; with `--json`, the same command goes on with what its file lacks. A run ends with a checkpoint of 2 GB:
set TMPDIR to a folder in memory where there is one.

Harder tasks, with a control and held-out curves (`python -m bench.reasoning_tasks` first, where reasoning-gym is installed):

    python -m bench.algorithms MODEL_FOLDER --tasks chain_sum,letter_counting,three_tools --only "advantage grpo" \\
        --steps 20 --set train.eval_every=5
"""

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from penstock.train.advantages import ADVANTAGES
from penstock.train.losses import LOSSES

AGENTS = Path(__file__).parent / "algorithm_agents"
TASKS = "multiply,search"
TEACHER_SEED = 1000
"""Of the teacher of seed 0, and so on."""
ONE_THREAD = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
"""Each of many processes would else start as many threads, and compilers, as there are cores."""


class AlgorithmRun(NamedTuple):
    task: str
    name: str
    settings: tuple[str, ...]
    seed: int


class AlgorithmResult(NamedTuple):
    """Rewards of the steps, held-out rewards, and seconds."""

    rewards: list[float]
    before: float
    after: float
    step_s: float
    update_s: float
    run_s: float = 0.0
    """The whole run: opening, evaluations and checkpoint included; of `distill`, its teacher's too."""
    curve: dict[str, float | None] = {}  # noqa: RUF012 - of a tuple
    """Held-out rewards during training, by step; with `--set train.eval_every=2` or the like."""


def runs(seeds: int, only: set[str], tasks: list[str]) -> list[AlgorithmRun]:
    named: dict[str, tuple[str, ...]] = {f"advantage {name}": (f"train.advantage={name}",) for name in ADVANTAGES.table}
    named |= {f"loss {name}": (f"train.loss={name}", "train.updates_per_step=2") for name in LOSSES.table}
    named["advantage pass_at_k"] += ("train.advantage_settings.passes=0.5",)
    named["advantage vine"] += ("rollout.branches=2",)
    named["control"] = ("train.lr=0.0",)
    chosen = {name: settings for name, settings in named.items() if not only or name in only or name == "control"}
    return [AlgorithmRun(task, name, chosen[name], seed) for seed in range(seeds) for task in tasks for name in chosen]


def run_one(one: AlgorithmRun, settings: list[str]) -> AlgorithmResult:
    """Trains in this process, which may have trained before."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given = [*settings, f"run.seed={one.seed}", *one.settings]
        if one.name == "advantage distill":
            taught = Path(folder) / "teacher"
            run_config(one.task, [*settings, f"run.seed={TEACHER_SEED + one.seed}"], taught)
            given.append(f'train.advantage_settings.teacher="{max((taught / one.task / "checkpoints").iterdir())}"')
        summary = run_config(one.task, given, Path(folder) / "run")
        lines = (Path(folder) / "run" / one.task / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    seconds = [step["rollout_s"] + step["train_s"] for step in steps]
    return AlgorithmResult(
        rewards=[step["reward"] for step in steps],
        curve=summary.evals,
        before=summary.eval_before,
        after=summary.eval_after,
        run_s=time.monotonic() - started,
        step_s=median(seconds[1:] or seconds),
        update_s=median([step["train_s"] for step in steps][1:] or [steps[0]["train_s"]]),
    )


def run_config(task: str, settings: list[str], folder: Path) -> Any:
    """Returns the summary of a run in `folder`."""
    from penstock.config import load_config
    from penstock.run.inputs import read_inputs
    from penstock.train.trainer import train

    config = load_config(AGENTS / f"{task}.toml", [f'run.folder="{folder}"', *settings])

    async def training() -> Any:
        return await train(config, read_inputs(config, _silent), listener=_silent, stop=asyncio.Event())

    return asyncio.run(training())


def wait_asleep() -> None:
    """Threads of this process that wait for the GPU sleep from here on: others need the cores on which they would spin."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxSetFlags_v2(0, 4)  # CU_CTX_SCHED_BLOCKING_SYNC
    except (OSError, AttributeError):
        pass  # there is no GPU


def _silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


def main() -> None:
    options = _options()
    settings = [f'model.name="{options.model}"', f"train.steps={options.steps}", *options.set]
    wanted = runs(options.seeds, set(filter(None, options.only.split(","))), options.tasks.split(","))
    kept = Path(options.json) if options.json else None
    os.environ.update({name: os.environ.get(name, "1") for name in ONE_THREAD})
    deadline, found = time.monotonic() + options.limit_s, read_results(kept)
    pool = ProcessPoolExecutor(options.at_once, multiprocessing.get_context("spawn"), wait_asleep)
    started = {pool.submit(run_one, one, settings): one for one in wanted if one not in found}
    try:
        for done in as_completed(started, timeout=options.limit_s):
            one = started[done]
            if (error := done.exception()) is not None:
                print(f"{one.task}, {one.name}, seed {one.seed}: failed: {str(error)[-300:]}", flush=True)
                continue
            found[one] = result = done.result()
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps({**one._asdict(), **result._asdict()}) + "\n")
            curve = " ".join(f"{reward:.2f}" for reward in result.rewards)
            held_out = f"{result.before:.2f} → {result.after:.2f}"
            print(f"{one.task}, {one.name}, seed {one.seed}: {held_out}; {curve}; {result.run_s:.0f} s", flush=True)
    except TimeoutError:
        print(f"stopped after {options.limit_s} s", flush=True)
    print(table(wanted, found), flush=True)
    for process in list((pool._processes or {}).values()):  # a run that is over the limit does not end by itself
        process.terminate()
    made = sum(one in found for one in wanted)
    print(f"{made} of {len(wanted)} runs, {options.limit_s - (deadline - time.monotonic()):.0f} s", flush=True)


def read_results(file: Path | None) -> dict[AlgorithmRun, AlgorithmResult]:
    """Returns what earlier runs of this command left, one JSON object in each line."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    found = dict[AlgorithmRun, AlgorithmResult]()
    for fields in map(json.loads, lines):
        one = AlgorithmRun(fields["task"], fields["name"], tuple(fields["settings"]), fields["seed"])
        found[one] = AlgorithmResult(**{name: fields[name] for name in AlgorithmResult._fields if name in fields})
    return found


def table(wanted: list[AlgorithmRun], found: dict[AlgorithmRun, AlgorithmResult]) -> str:
    """A row for each algorithm: the mean held-out reward after training, of each seed too, and seconds."""
    tasks = list(dict.fromkeys(one.task for one in wanted))
    rows = ["| | " + " | ".join(f"{task}, held out | last steps | s a step | s an update" for task in tasks) + " |"]
    rows.append("|---|" + "---|" * 4 * len(tasks))
    for name in dict.fromkeys(one.name for one in wanted):
        cells = [_cells([found.get(one) for one in wanted if one.name == name and one.task == task]) for task in tasks]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cells(by_seed: list[AlgorithmResult | None]) -> str:
    results = [result for result in by_seed if result is not None]
    if not results:
        return "missing | | | "
    after = ", ".join("missing" if result is None else f"{result.after:.2f}" for result in by_seed)
    last = fmean(fmean(result.rewards[-3:]) for result in results)
    mean = fmean(result.after for result in results)
    step_s, update_s = median(result.step_s for result in results), median(result.update_s for result in results)
    return f"**{mean:.2f}** ({after}) | {last:.2f} | {step_s:.2f} | {update_s:.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a model folder, or a name that `model.name` takes")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tasks", default=TASKS, help="files of bench/algorithm_agents, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=480)
    parser.add_argument("--only", default="", help="names such as 'advantage rloo', separated by commas")
    parser.add_argument("--set", action="append", default=[], help="settings for all runs, such as engine.cache_tokens=65536")
    parser.add_argument("--json", default="", help="a file of results, a line for each run: those in it are not made again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
