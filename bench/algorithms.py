"""Every advantage and every loss on two tasks over several seeds: what each learnt, and what it cost.

    python -m bench.algorithms MODEL_FOLDER [--at-once 8] [--seeds 3] [--steps 10] [--limit-s 480] [--only NAME,…] [--json FILE]

Losses take two updates a step, so that their ratios differ from 1. `control` has a learning rate of 0. Runs are made beside each
other, several in each process: seconds are those of a shared GPU, for comparison with each other alone. What is not done by the
limit is told as missing.
"""

import argparse
import asyncio
import json
import multiprocessing
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
TASKS = ("multiply", "search")
LEFT_OUT = {"distill"}
"""Needs a teacher; see `docs/algorithms.md`."""


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


def runs(seeds: int, only: set[str]) -> list[AlgorithmRun]:
    named: dict[str, tuple[str, ...]] = {
        f"advantage {name}": (f"train.advantage={name}",) for name in ADVANTAGES.table if name not in LEFT_OUT
    }
    named |= {f"loss {name}": (f"train.loss={name}", "train.updates_per_step=2") for name in LOSSES.table}
    named["advantage pass_at_k"] += ("train.advantage_settings.passes=0.5",)
    named["control"] = ("train.lr=0.0",)
    chosen = {name: settings for name, settings in named.items() if not only or name in only or name == "control"}
    return [AlgorithmRun(task, name, chosen[name], seed) for seed in range(seeds) for task in TASKS for name in chosen]


def run_one(one: AlgorithmRun, settings: list[str]) -> AlgorithmResult:
    """Trains in this process, which may have trained before."""
    from penstock.config import load_config
    from penstock.run.inputs import read_inputs
    from penstock.train.run import train

    with tempfile.TemporaryDirectory() as folder:
        given = [f'run.folder="{folder}"', f"run.seed={one.seed}", *settings, *one.settings]
        config = load_config(AGENTS / f"{one.task}.toml", given)

        async def training() -> Any:
            return await train(config, read_inputs(config, _silent), listener=_silent, stop=asyncio.Event())

        summary = asyncio.run(training())
        lines = (Path(folder) / one.task / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    seconds = [step["rollout_s"] + step["train_s"] for step in steps]
    return AlgorithmResult(
        rewards=[step["reward"] for step in steps],
        before=summary.eval_before,
        after=summary.eval_after,
        step_s=median(seconds[1:] or seconds),
        update_s=median([step["train_s"] for step in steps][1:] or [steps[0]["train_s"]]),
    )


def _silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


def main() -> None:
    options = _options()
    settings = [f'model.name="{options.model}"', f"train.steps={options.steps}", *options.set]
    wanted = runs(options.seeds, set(filter(None, options.only.split(","))))
    deadline, found = time.monotonic() + options.limit_s, dict[AlgorithmRun, AlgorithmResult]()
    pool = ProcessPoolExecutor(options.at_once, mp_context=multiprocessing.get_context("spawn"))
    started = {pool.submit(run_one, one, settings): one for one in wanted}
    try:
        for done in as_completed(started, timeout=options.limit_s):
            one = started[done]
            if (error := done.exception()) is not None:
                print(f"{one.task}, {one.name}, seed {one.seed}: failed: {str(error)[-300:]}", flush=True)
                continue
            found[one] = result = done.result()
            curve = " ".join(f"{reward:.2f}" for reward in result.rewards)
            print(f"{one.task}, {one.name}, seed {one.seed}: {result.before:.2f} → {result.after:.2f}; {curve}", flush=True)
    except TimeoutError:
        print(f"stopped after {options.limit_s} s", flush=True)
    print(table(wanted, found), flush=True)
    if options.json:
        kept = [{**one._asdict(), **result._asdict()} for one, result in found.items()]
        Path(options.json).write_text(json.dumps(kept))
    for process in list((pool._processes or {}).values()):  # a run that is over the limit does not end by itself
        process.terminate()
    print(f"{len(found)} of {len(wanted)} runs, {options.limit_s - (deadline - time.monotonic()):.0f} s", flush=True)


def table(wanted: list[AlgorithmRun], found: dict[AlgorithmRun, AlgorithmResult]) -> str:
    """A row for each algorithm: the mean held-out reward after training, of each seed too, and seconds."""
    rows = ["| | " + " | ".join(f"{task}, held out | last steps | s a step | s an update" for task in TASKS) + " |"]
    rows.append("|---|" + "---|" * 4 * len(TASKS))
    for name in dict.fromkeys(one.name for one in wanted):
        cells = [_cells([found[one] for one in wanted if one.name == name and one.task == task and one in found]) for task in TASKS]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cells(results: list[AlgorithmResult]) -> str:
    if not results:
        return "missing | | | "
    after = ", ".join(f"{result.after:.2f}" for result in results)
    last = fmean(fmean(result.rewards[-3:]) for result in results)
    mean = fmean(result.after for result in results)
    step_s, update_s = median(result.step_s for result in results), median(result.update_s for result in results)
    return f"**{mean:.2f}** ({after}) | {last:.2f} | {step_s:.2f} | {update_s:.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a model folder, or a name that `model.name` takes")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=480)
    parser.add_argument("--only", default="", help="names such as 'advantage rloo', separated by commas")
    parser.add_argument("--set", action="append", default=[], help="settings for all runs, such as engine.cache_tokens=65536")
    parser.add_argument("--json", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
