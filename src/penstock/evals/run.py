"""Runs an evaluation: plans the missing rollouts, runs them, and summarizes. The pool records which have ended."""

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.evals.outcome import CHANNEL, EvalOutcome, outcome, read_groups, score_tasks
from penstock.evals.spending import Prices, prices_of, rollout_seconds
from penstock.events import Events, Listener
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, Rollout, RolloutRef, Sampling, Task, make_rollout
from penstock.rollout.scheduler import LOST, RunnerPort, run_to_end
from penstock.run.folder import RunFolder, locked, open_run_folder
from penstock.run.inputs import Inputs
from penstock.run.opening import bind_pool, open_pool, open_rollout_runner, sampling
from penstock.run.shortfalls import read_notices
from penstock.run.tracking import tracking
from penstock.sdk.discovery import Agent
from penstock.system.files import file_checksum

MAY_CHANGE = (
    "train.", "gateway.", "executor.", "scale.", "track.", "run.folder", "dataset.train", "eval.rows", "eval.k", "eval.passes",
    "eval.processes", "engine.price_", "engine.api_key_env", "engine.retries", "engine.retry_s", "engine.first_token_s",
    "engine.stall_s", "engine.slots", "engine.cache_tokens", "rollout.executor", "rollout.concurrency", "rollout.retries",
    "rollout.group", "rollout.min_size", "rollout.top_up", "rollout.max_", "rollout.overflow",
)  # fmt: skip
"""Keys that a resumed evaluation may change: they have no influence on rollouts that have ended."""
OPEN_BATCH = 100
"""Groups opened at once: they share one fsync."""
UNFINISHED = (None, End.CANCELLED, End.LOST)
"""Ends of rollouts that an earlier process did not finish: they run again."""
HEAD_START_S = 3.0
"""How long the first rollout may have the engine to itself: the user soon sees whether the agent works at all, and the engine
has cached the prompts' common prefix before the others start."""


class EvalRow(NamedTuple):
    """A task to evaluate, and its row in the dataset."""

    number: int
    task: Task


class PlannedRollout(NamedTuple):
    """A rollout to run."""

    rollout: RolloutRef
    task: Task


class EvalPlan(NamedTuple):
    """The rollouts to run."""

    rollouts: list[PlannedRollout]
    done: int
    """Rollouts that have ended already."""


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
    """Rollouts that an earlier process ran."""
    seconds: float
    """How long this process took, loading left out."""
    notices: dict[str, int] = field(default_factory=dict[str, int])
    """How often the gateway deviated from a request, by name: capped lengths, truncated replies, ignored fields."""
    prices: Prices | None = None
    """Prices that the cost was computed from."""


def evaluation_config(config: RunConfig) -> RunConfig:
    """Returns the checked settings of an evaluation, in a folder apart from training runs of the same name."""
    if too_many := [k for k in config.eval.k if not 1 <= k <= config.eval.samples]:
        raise ConfigError(f"eval.k = {too_many[0]}: pass@{too_many[0]} needs as many rollouts; raise eval.samples")
    if not POOLS.load(config.pool.name).durable:
        raise ConfigError(f"pool.name = {config.pool.name!r} keeps nothing to resume an evaluation from; use 'sqlite'")
    if config.eval.processes != 1:
        text = "an evaluation runs in one process; leave it out, and set rollout.executor to 'process' or 'ray'"
        raise ConfigError(f"eval.processes = {config.eval.processes}: {text}")
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": config.run.folder / "evals"})})


def select_rows(config: RunConfig, inputs: Inputs) -> list[EvalRow]:
    """Returns the tasks of `dataset.eval`, else of `dataset.train`, that `eval.rows` selects."""
    path, tasks = config.dataset.eval or config.dataset.train, inputs.heldout or inputs.tasks
    return [EvalRow(number, tasks[number]) for number in chosen_rows(config.eval.rows, len(tasks), path)]


def chosen_rows(text: str, count: int, path: Path) -> list[int]:
    """Returns rows such as `0-9,17` as sorted numbers; all if `text` is empty."""
    if not text.strip():
        return list(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"eval.rows = {text!r}: write rows and ranges, such as 0-9,17")
        chosen.update(range(int(first), int(last or first) + 1))
    if beyond := sorted(number for number in chosen if number >= count):
        raise ConfigError(f"eval.rows = {text!r}: {path} has rows 0 to {count - 1}, not {beyond[0]}")
    return sorted(chosen)


async def evaluate(
    config: RunConfig,
    inputs: Inputs,
    *,
    listener: Listener,
    stop: asyncio.Event,
    fresh: bool = False,
    retry_failed: bool = False,
) -> Evaluation:
    """Run `eval.samples` rollouts of each row, or resume an earlier process's evaluation; `stop` cancels what runs."""
    rows = select_rows(config, inputs)
    folder = open_run_folder(config, fresh=fresh, may_change=MAY_CHANGE, digests=grading_digests(inputs.agent))
    with locked(folder.path), Events(folder.events) as events:
        events.listen(listener)
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
        plan = await plan_rollouts(rows, pool, samples=config.eval.samples, retry_failed=retry_failed)
        started = await _run_missing(config, inputs, folder, events, pool, plan, stop)
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
        resumed=plan.done,
        seconds=round(time.monotonic() - started, 3),
        notices=read_notices(folder.events),
        prices=prices,
    )
    folder.write_summary(orjson.dumps(as_json(evaluation)))
    events.emit("eval.over", status=evaluation.status, rollouts=evaluation.outcome.rollouts)
    return evaluation


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Returns plain JSON values."""
    return asdict(evaluation) | {
        "outcome": evaluation.outcome.as_json(),
        "prices": evaluation.prices and evaluation.prices._asdict(),
    }


def grading_digests(agent: Agent) -> dict[str, str]:
    """Returns digests of the code that decides a rollout's result: of the entry file or the agent's objects, and of the grader."""
    files = [value for _, value in agent.grader_config or () if isinstance(value, Path)]
    texts = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in agent.sources.items()}
    entry = [] if texts else [agent.entry]
    return texts | {str(file): file_checksum(file) for file in (*entry, *files) if file.is_file()}


async def plan_rollouts(rows: Sequence[EvalRow], pool: Pool, *, samples: int, retry_failed: bool = False) -> EvalPlan:
    """Open groups that do not exist, and replace rollouts that were not finished or, with `retry_failed`, that failed."""
    again = {
        group.seq: [rollout.ref for rollout in group.rollouts if _needs_retry(rollout, retry_failed)]
        async for group in read_groups(pool)
    }
    planned: list[PlannedRollout] = []
    for first in range(0, len(rows), OPEN_BATCH):
        async with asyncio.TaskGroup() as opening:
            given = [
                opening.create_task(_rollouts_of(row, again.get(row.number), pool, samples=samples))
                for row in rows[first : first + OPEN_BATCH]
            ]
        planned += [place for each in given for place in each.result()]
    return EvalPlan(planned, len(rows) * samples - len(planned))


async def _rollouts_of(row: EvalRow, again: Sequence[RolloutRef] | None, pool: Pool, *, samples: int) -> list[PlannedRollout]:
    """Returns the rollouts of one row: replacements of those in `again`, or all if its group does not exist (None)."""
    if again is not None:
        return [PlannedRollout(await pool.replace(rollout, LOST), row.task) for rollout in again]
    rollouts = [make_rollout(f"{CHANNEL}-{row.number}", row.task.id, place, channel=CHANNEL) for place in range(samples)]
    await pool.open_group(row.task, rollouts, seq=row.number)
    return [PlannedRollout(rollout, row.task) for rollout in rollouts]


async def run_planned(
    planned: Sequence[PlannedRollout],
    runner: RunnerPort,
    pool: Pool,
    *,
    sampling: Sampling,
    concurrency: int,
    retries: int,
) -> None:
    """Run each to its end, `concurrency` at once; one that is lost with its worker runs again."""
    slots = asyncio.Semaphore(concurrency)

    async def run(rollout: PlannedRollout) -> None:
        try:
            await run_to_end(*rollout, runner, pool=pool, sampling=sampling, retries=retries)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as running:
        for number, rollout in enumerate(planned):
            await slots.acquire()
            task = running.create_task(run(rollout))
            if number == 0:
                await asyncio.wait({task}, timeout=HEAD_START_S)


def _needs_retry(rollout: Rollout, retry_failed: bool) -> bool:
    return rollout.end in UNFINISHED or (retry_failed and rollout.end is not End.COMPLETED)


async def _run_missing(
    config: RunConfig, inputs: Inputs, folder: RunFolder, events: Events, pool: Pool, plan: EvalPlan, stop: asyncio.Event
) -> float:
    """Run the planned rollouts. Returns when the first one started: loading does not count."""
    if not plan.rollouts:
        return time.monotonic()
    async with open_rollout_runner(config, inputs, folder, events, pool) as opened:
        started = time.monotonic()
        events.emit("eval.begin", model=inputs.model, folder=str(folder.path), rollouts=len(plan.rollouts), done=plan.done)
        work = run_planned(
            plan.rollouts,
            opened.runner,
            pool,
            sampling=_sampling(config),
            concurrency=config.rollout.concurrency,
            retries=config.rollout.retries,
        )
        await run_until_stopped(work, stop)
        return started


async def run_until_stopped(work: Coroutine[Any, Any, Any], stop: asyncio.Event) -> None:
    """Run `work` to its end; `stop` cancels it."""
    job, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({job, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        job.cancel()
        with suppress(asyncio.CancelledError):
            await job


def _sampling(config: RunConfig) -> Sampling:
    given, one = config.eval.temperature, config.eval.samples == 1
    default = config.sampling.eval_temperature if one else config.sampling.temperature
    return sampling(config, temperature=default if given is None else given)
