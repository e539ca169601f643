"""An evaluation from start to end: checked, opened or resumed, run, summed up."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.evals.attempts import EvalPlan, EvalRow, plan_attempts, read_groups, run_attempts
from penstock.evals.outcome import EvalOutcome, outcome, score_tasks
from penstock.evals.processes import check_limits, check_processes, open_processes, prefetch_count, processes_hint
from penstock.evals.spending import Prices, prices_of, rollout_seconds
from penstock.evals.worker_process import wait_for_processes
from penstock.events import Events, Listener
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Sampling
from penstock.rollout.scheduler import RunnerPort
from penstock.run.folder import RunFolder, locked, open_run_folder
from penstock.run.inputs import Inputs
from penstock.run.notices import read_notices
from penstock.run.opening import bind_pool, open_pool, open_rollout_runner, sampling
from penstock.run.tracking import tracking
from penstock.sdk.discovery import Agent

MAY_CHANGE = (
    "train.", "gateway.", "executor.", "scale.", "track.", "run.folder", "dataset.train", "eval.rows", "eval.k", "eval.passes",
    "eval.processes", "engine.price_", "engine.api_key_env", "engine.retries", "engine.retry_s", "engine.first_token_s",
    "engine.stall_s", "engine.slots", "engine.cache_tokens", "rollout.executor", "rollout.concurrency", "rollout.retries",
    "rollout.group", "rollout.min_size", "rollout.top_up", "rollout.max_", "rollout.overflow",
)  # fmt: skip
"""Keys that a resumed evaluation may change: they have no influence on attempts that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation."""

    name: str
    folder: str
    status: str
    """"finished", or "stopped" if it can be resumed."""
    model: str
    outcome: EvalOutcome
    resumed: int
    """Attempts that an earlier process had made."""
    seconds: float
    """How long this process took, loading left out."""
    notices: dict[str, int] = field(default_factory=dict[str, int])
    """What the gateway did not do as agents asked, by name: capped lengths, replies that were cut, ignored fields."""
    prices: Prices | None = None
    """From which its cost was computed."""


def evaluation_config(config: RunConfig) -> RunConfig:
    """Returns the checked settings of an evaluation, in a folder apart from training runs of the same name."""
    if too_many := [k for k in config.eval.k if not 1 <= k <= config.eval.samples]:
        raise ConfigError(f"eval.k = {too_many[0]}: pass@{too_many[0]} needs as many attempts; raise eval.samples, or leave it out")
    if not POOLS.load(config.pool.name).durable:
        raise ConfigError(f"pool.name = {config.pool.name!r} forgets: an evaluation that is stopped could not go on; use 'sqlite'")
    check_processes(config)
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": config.run.folder / "evals"})})


def select_rows(config: RunConfig, inputs: Inputs) -> list[EvalRow]:
    """Returns the tasks of `dataset.eval`, else of `dataset.train`, that `eval.rows` selects."""
    path, tasks = config.dataset.eval or config.dataset.train, inputs.heldout or inputs.tasks
    return [EvalRow(number, tasks[number]) for number in chosen_rows(config.eval.rows, len(tasks), path)]


def chosen_rows(text: str, count: int, path: Path) -> list[int]:
    """Returns rows such as `0-9,17` as sorted numbers; all if `text` is empty."""
    if not text.strip():
        return list(range(count))
    evaluation: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"eval.rows = {text!r}: write rows and ranges, such as 0-9,17")
        evaluation.update(range(int(first), int(last or first) + 1))
    if beyond := sorted(number for number in evaluation if number >= count):
        raise ConfigError(f"eval.rows = {text!r}: {path} has rows 0 to {count - 1}, not {beyond[0]}")
    return sorted(evaluation)


async def evaluate(
    config: RunConfig,
    inputs: Inputs,
    *,
    listener: Listener,
    stop: asyncio.Event,
    fresh: bool = False,
    retry_failed: bool = False,
) -> Evaluation:
    """Run `eval.samples` attempts at each row, or resume an earlier process's evaluation; `stop` cancels what runs."""
    rows = select_rows(config, inputs)
    check_limits(config, inputs.agent)
    folder = open_run_folder(config, fresh=fresh, may_change=MAY_CHANGE, files=grading_files(inputs.agent))
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
        await wait_for_processes(folder.path, events)
        async with tracking(config, folder, events):
            return await _evaluate(config, inputs, folder, events, rows, stop, retry_failed=retry_failed)


async def _evaluate(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    events: Events,
    rows: list[EvalRow],
    stop: asyncio.Event,
    *,
    retry_failed: bool,
) -> Evaluation:
    pool = open_pool(config, folder)
    try:
        await bind_pool(pool, folder)
        planned = await plan_attempts(rows, pool, samples=config.eval.samples, retry_failed=retry_failed)
        started = await _run_missing(config, inputs, folder, events, pool, planned, stop)
        numbers = {row.number for row in rows}
        scored = await score_tasks(group async for group in read_groups(pool) if group.seq in numbers)
    finally:
        await pool.close()
    prices = prices_of(config.model_dump(include={"engine"}))
    evaluation = Evaluation(
        name=config.run.name,
        folder=str(folder.path),
        status="stopped" if stop.is_set() else "finished",
        model=inputs.model,
        outcome=outcome(scored, config.eval, prices=prices, seconds=rollout_seconds(folder.events)),
        resumed=planned.done,
        seconds=round(time.monotonic() - started, 3),
        notices=read_notices(folder.events),
        prices=prices,
    )
    folder.write_summary(orjson.dumps(as_json(evaluation)))
    events.emit("eval.over", status=evaluation.status, rollouts=evaluation.outcome.rollouts)
    return evaluation


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Plain values; estimates by name."""
    return asdict(evaluation) | {
        "outcome": evaluation.outcome.as_json(),
        "prices": evaluation.prices and evaluation.prices._asdict(),
    }


def grading_files(agent: Agent) -> list[Path]:
    """Returns the files that decide a rollout's result besides the settings: the entry file, and the grader's."""
    files = [value for _, value in agent.grader_config or () if isinstance(value, Path)]
    return [file for file in (agent.entry, *files) if file.is_file()]


async def _run_missing(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool, planned: EvalPlan, stop: asyncio.Event
) -> float:
    """Make what is missing; when that began, loading left out."""
    if not planned.attempts:
        return time.monotonic()
    count = min(config.eval.processes, config.rollout.concurrency, len(planned.attempts))  # one more would have nothing to do
    async with _open_runner(config, inputs, folder, events, pool, count) as runs:
        started, computed = time.monotonic(), time.process_time()
        events.emit("eval.begin", model=inputs.model, folder=str(folder.path), rollouts=len(planned.attempts), done=planned.done)
        work = asyncio.ensure_future(
            run_attempts(
                planned.attempts,
                runs,
                pool,
                sampling=_sampling(config),
                concurrency=config.rollout.concurrency,
                retries=config.rollout.retries,
                first_alone=count,
                prefetch=prefetch_count(config.rollout.concurrency, count),
            )
        )
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        took = {"busy_s": time.process_time() - computed, "seconds": time.monotonic() - started}
        if count == 1 and (text := processes_hint(config, inputs.agent, **took)):
            events.emit("stage", text=text)
        return started


@asynccontextmanager
async def _open_runner(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool, count: int
) -> AsyncGenerator[RunnerPort]:
    """Yields what runs attempts: this process's runner, or `count` other processes."""
    if count > 1:
        async with open_processes(config, inputs, folder, events, pool, count=count) as processes:
            yield processes
    else:
        async with open_rollout_runner(config, inputs, folder, events, pool) as opened:
            yield opened.runner


def _sampling(config: RunConfig) -> Sampling:
    given, one = config.eval.temperature, config.eval.samples == 1
    default = config.sampling.eval_temperature if one else config.sampling.temperature
    return sampling(config, temperature=default if given is None else given)
