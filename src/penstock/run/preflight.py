"""Checks before a run: all settings and inputs at once and, as a dry run, one complete rollout."""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import PoolSection, RunConfig, RunKind
from penstock.errors import Problems
from penstock.events import Events, Listener
from penstock.models import check_reachable, find_cached
from penstock.pool import POOLS
from penstock.records import End, Rollout
from penstock.rollout.scheduler import run_once
from penstock.run.folder import open_run_folder
from penstock.run.inputs import Check, Inputs, check_datasets, check_inputs, check_kind, read_inputs
from penstock.run.opening import open_rollout_runner, sampling


def check_project(config: RunConfig, where: str, check: Check) -> None:
    """Raises one ConfigError with all problems: names, port, executor, agent, every row, the model, and those that `check` finds.

    Loads the agent's code in a separate process; writes nothing and pulls no model.
    """
    problems = Problems()
    checked = check_inputs(config, problems, check)
    check_datasets(config, checked.agent and checked.agent.columns, problems)
    if not any(key == "model.name" for key, _ in problems.errors):
        with problems.noting("model.name"):
            _check_model(config)
    problems.refuse(where)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """Result of a dry run."""

    model: str
    task: str
    status: str
    """How it ended."""
    message: str
    reward: float | None
    steps: int
    """Model calls."""
    tokens: int
    """Sampled tokens."""
    seconds: float
    """Duration of the rollout, without loading."""

    @property
    def completed(self) -> bool:
        return self.status == End.COMPLETED


def _ignore_event(kind: str, fields: dict[str, Any]) -> None:
    pass


def dry_run(config: RunConfig, check: Check, *, kind: RunKind = "eval", listener: Listener = _ignore_event) -> DryRunResult:
    """Runs and grades the first task once, in a temporary folder, without training.

    Loads the agent's code in this process, and pulls the model if needed.
    """
    check_kind(config, kind)
    return asyncio.run(_run_first_task(config, read_inputs(config, listener, check=check), kind, listener))


async def _run_first_task(config: RunConfig, inputs: Inputs, kind: RunKind, listener: Listener) -> DryRunResult:
    with tempfile.TemporaryDirectory(prefix="penstock-dry-run-") as scratch:
        run = config.run.model_copy(update={"name": "dry-run", "folder": Path(scratch)})
        config = config.model_copy(update={"run": run, "pool": PoolSection(name="memory")})
        folder = open_run_folder(config, fresh=False)
        with Events(folder.events) as events:
            events.listen(listener)
            pool = POOLS.load(config.pool.name)(folder.path)
            try:
                async with open_rollout_runner(config, inputs, folder, events, pool) as opened:
                    task, started = (inputs.heldout or inputs.tasks)[0], time.monotonic()
                    how = sampling(config, temperature=_temperature(config, kind))
                    [name] = await run_once([task], opened.runner, pool=pool, sampling=how, limits=config.rollout)
                    attempt, seconds = await pool.rollout(name), time.monotonic() - started
            finally:
                await pool.close()
    return _dry_run_result(attempt, inputs.model, task.id, seconds)


def _dry_run_result(attempt: Rollout, model: str, task: str, seconds: float) -> DryRunResult:
    assert attempt.end is not None  # it was run to its end
    return DryRunResult(
        model=model,
        task=task,
        status=attempt.end.value,
        message=attempt.message,
        reward=attempt.reward,
        steps=len(attempt.steps),
        tokens=sum(step.sampled for step in attempt.steps),
        seconds=round(seconds, 3),
    )


def _temperature(config: RunConfig, kind: RunKind) -> float:
    return config.sampling.temperature if kind == "train" else config.sampling.eval_temperature


def _check_model(config: RunConfig) -> None:
    if config.engine.text_only:
        config.engine.preflight(config.model.name)
        return
    check_reachable(config.model.name)
    found = find_cached(config.model.name)
    config.engine.preflight(found.name if found else config.model.name)
