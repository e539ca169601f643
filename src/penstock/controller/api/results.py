"""What an evaluation has come to so far, read from its pool while another process writes that; nothing is read twice."""

import asyncio
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.config import EvalSection
from penstock.controller.api.curves import TrainingProgress, TrainingReader
from penstock.controller.context import Controller
from penstock.controller.runs import Run, RunFiles
from penstock.errors import ControllerError
from penstock.evals.metrics import pass_at_k
from penstock.evals.spending import rollout_usage
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import Attempt, End
from penstock.system.files import write_file

MAX_CACHED = 200
"""Evaluations whose numbers are kept in memory."""
RETRIED_ENDS = (End.CANCELLED, End.LOST)
"""Ends of attempts that are made again when the evaluation goes on: they count as not made."""


class AttemptSummary(NamedTuple):
    """An attempt that has ended, in a line."""

    rollout_id: str
    row: int
    place: int
    end: str
    reward: float
    """0 for one that failed."""
    message: str
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    """Of its model calls."""


@dataclass(slots=True)
class EvaluationProgress:
    """What was read of an evaluation's pool."""

    position: int = 0
    """Of the last change that was looked at."""
    rows: set[int] = field(default_factory=set[int])
    """Tasks that are to be tried."""
    tried: dict[tuple[int, int], AttemptSummary] = field(default_factory=dict[tuple[int, int], AttemptSummary])
    """By row and place: the last attempt."""

    def ordered(self, rows: frozenset[int] | None = None) -> list[AttemptSummary]:
        """Attempts that count, by row and place."""
        found = [each for _, each in sorted(self.tried.items()) if each.end not in RETRIED_ENDS]
        return found if rows is None else [each for each in found if each.row in rows]


class EvaluationReader:
    def __init__(self) -> None:
        self._seen: OrderedDict[str, EvaluationProgress] = OrderedDict()
        self._lock = asyncio.Lock()

    async def read(self, run: Run, files: RunFiles) -> EvaluationProgress | None:
        """None before its process has begun."""
        folder, kept = files.results(run), files.path / "attempts.json"
        async with self._lock:
            seen = self._seen.get(run.id)
            if seen is None:
                seen = self._seen[run.id] = await asyncio.to_thread(_load_progress, kept) or EvaluationProgress()
                while len(self._seen) > MAX_CACHED:
                    self._seen.popitem(last=False)
            if run.status.over and kept.exists():
                return seen
            pool = await asyncio.to_thread(open_pool, folder)
            if pool is None:
                return None
            try:
                await _read_changes(pool, seen)
            finally:
                await pool.close()
            if run.status.over:
                with suppress(OSError):  # a full disk: it is read again next time
                    await asyncio.to_thread(_save_progress, kept, seen)
            return seen


def open_pool(folder: Path) -> Pool | None:
    """The pool of a run's folder; None where there is none yet."""
    try:
        config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())["config"]
    except (OSError, ValueError, LookupError):
        return None
    kind = POOLS.load(config["pool"]["name"])
    return None if kind.why_unreadable(folder) else kind(folder, url=config["pool"].get("url", ""))


def eval_section(files: RunFiles) -> EvalSection:
    """How the run was asked to evaluate."""
    try:
        return EvalSection.model_validate(orjson.loads(files.config.read_bytes()).get("eval", {}))
    except (OSError, ValueError):
        return EvalSection()


async def _read_changes(pool: Pool, seen: EvaluationProgress) -> None:
    while changes := await pool.changes(seen.position):
        for change in changes:
            if change.kind == "opened":
                seen.rows.add(_row(change.id))
            elif change.kind == "ended":
                tried = _summarize(await pool.attempt(change.id))
                known = seen.tried.get((tried.row, tried.place))
                if known is None or known.end in RETRIED_ENDS or tried.end not in RETRIED_ENDS:
                    seen.tried[tried.row, tried.place] = tried
            seen.position = change.position


def _summarize(attempt: Attempt) -> AttemptSummary:
    rollout, spent = attempt.rollout, rollout_usage(attempt)
    return AttemptSummary(
        rollout_id=rollout.id,
        row=_row(rollout.group_id),
        place=rollout.place,
        end=str(attempt.end),
        reward=attempt.reward or 0.0,
        message=attempt.message,
        calls=len(spent.call_s),
        prompt_tokens=spent.prompt_tokens,
        sampled_tokens=spent.completion_tokens,
        seconds=round(sum(spent.call_s), 4),
    )


def _row(group_id: str) -> int:
    """An evaluation numbers its groups by row: `eval-17`."""
    return int(group_id.rpartition("-")[2])


def _load_progress(file: Path) -> EvaluationProgress | None:
    try:
        found = orjson.loads(file.read_bytes())
        tried = [AttemptSummary(*each) for each in found["tried"]]
        return EvaluationProgress(found["position"], set(found["rows"]), {(each.row, each.place): each for each in tried})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _save_progress(file: Path, seen: EvaluationProgress) -> None:
    tried = [list(each) for each in seen.tried.values()]
    write_file(file, orjson.dumps({"position": seen.position, "rows": sorted(seen.rows), "tried": tried}))


def eval_results(
    seen: EvaluationProgress, section: EvalSection, *, dataset_rows: int | None, resumed: int | None
) -> dict[str, Any]:
    """`results` of a list or a detail. An attempt that failed has reward 0, is graded, and does not pass."""
    tried = seen.ordered()
    stats = reward_stats(tried)
    spread = (
        None if stats is None else stats | {"pass_at_k": {str(k): value for k, value in pass_at_k_values(tried, section).items()}}
    )
    return {
        "score": stats and stats["mean"],
        "total_runs": len(tried),
        "sampled_rows": len(seen.rows),
        "total_dataset_rows": dataset_rows,
        **_counts(tried, section),
        "total_tokens": _tokens(tried),
        "resumed_count": resumed,
        "reward_stats": spread,
    }


def eval_overview(seen: EvaluationProgress, section: EvalSection, *, duration_ms: int | None) -> dict[str, Any]:
    """`overview` of the metrics."""
    tried = seen.ordered()
    return {
        "duration_ms": duration_ms,
        "total_samples": len(seen.rows) * section.samples,
        "completed_samples": len(tried),
        **_counts(tried, section),
        "tokens_used": _tokens(tried),
    }


def reward_stats(tried: Sequence[AttemptSummary]) -> dict[str, float] | None:
    """Over attempts; None before the first."""
    rewards = [each.reward for each in tried]
    if not rewards:
        return None
    return {
        "mean": statistics.fmean(rewards),
        "median": statistics.median(rewards),
        "std": statistics.pstdev(rewards),
        "min": min(rewards),
        "max": max(rewards),
    }


def has_passed(each: AttemptSummary, section: EvalSection) -> bool:
    """Whether the attempt's reward is high enough; one that failed has none."""
    return each.end == "completed" and each.reward >= section.passes


def pass_at_k_values(tried: Sequence[AttemptSummary], section: EvalSection) -> dict[int, float]:
    """pass@k, the mean over rows all of whose attempts have ended; unbiased."""
    rows: dict[int, list[bool]] = {}
    for each in tried:
        rows.setdefault(each.row, []).append(has_passed(each, section))
    whole = [row for row in rows.values() if len(row) == section.samples]
    return {k: statistics.fmean(pass_at_k(len(row), sum(row), k) for row in whole) for k in section.k if whole}


def _counts(tried: Sequence[AttemptSummary], section: EvalSection) -> dict[str, Any]:
    right = sum(has_passed(each, section) for each in tried)
    return {
        "graded": len(tried),
        "passed": right,
        "failed": len(tried) - right,
        "skipped": 0,
        "pass_rate": right / len(tried) if tried else None,
        "pass_threshold": section.passes,
    }


def _tokens(tried: Sequence[AttemptSummary]) -> int:
    return sum(each.prompt_tokens + each.sampled_tokens for each in tried)


class RunResults:
    """Of all runs of a controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._evaluations = EvaluationReader()
        self._trainings = TrainingReader()

    def files(self, run: Run) -> RunFiles:
        return RunFiles(self._controller.home.runs / run.id)

    async def seen(self, run: Run) -> EvaluationProgress | None:
        """What an evaluation has tried; None before it has begun."""
        return await self._evaluations.read(run, self.files(run))

    async def trained(self, run: Run) -> TrainingProgress:
        """What a training run has come to."""
        return await asyncio.to_thread(self._trainings.read, self.files(run).results(run))

    async def results(self, run: Run) -> dict[str, Any] | None:
        """`results` of an evaluation; None before it has begun."""
        seen = await self.seen(run)
        if seen is None:
            return None
        files = self.files(run)
        rows = await asyncio.to_thread(self._dataset_rows, run.submission.dataset)
        resumed = (await asyncio.to_thread(run_summary, files, run)).get("resumed")
        return eval_results(seen, eval_section(files), dataset_rows=rows, resumed=resumed)

    async def evaluation_metrics(self, run: Run) -> dict[str, Any]:
        """Of an evaluation, as the platform gives them; nothing tried yet is told as such."""
        files, seen = self.files(run), await self.seen(run) or EvaluationProgress()
        section, tried = eval_section(files), seen.ordered()
        return {
            "eval_run_id": run.id,
            "status": run.status,
            "overview": eval_overview(seen, section, duration_ms=duration_ms(run)),
            "reward_stats": reward_stats(tried),
            "pass_at_k": [{"k": k, "value": value} for k, value in pass_at_k_values(tried, section).items()],
        }

    async def training_metrics(self, run: Run) -> dict[str, Any]:
        """Of a training run."""
        trained = await self.trained(run)
        told = {
            "duration_ms": duration_ms(run),
            "latest_step": trained.step,
            "total_steps": trained.steps or planned_steps(self.files(run)),
            "examples_processed_count": trained.examples,
            "metric_summaries": trained.summaries(),
        }
        return {"training_run_id": run.id, "status": run.status, "overview": told, "metrics": trained.metrics()}

    def _dataset_rows(self, name: str) -> int | None:
        try:
            return self._controller.datasets.get(name).rows
        except ControllerError:  # one that came with the code, or was removed since
            return None


def run_summary(files: RunFiles, run: Run) -> dict[str, Any]:
    """What the run's process last wrote of itself; empty before that."""
    try:
        return orjson.loads((files.results(run) / "summary.json").read_bytes())
    except (OSError, ValueError):
        return {}


def run_settings(files: RunFiles) -> dict[str, Any]:
    """The whole config of a run."""
    try:
        return orjson.loads(files.config.read_bytes())
    except (OSError, ValueError):
        return {}


def planned_steps(files: RunFiles) -> int | None:
    """Of training, as it was asked for."""
    return run_settings(files).get("train", {}).get("steps")


def duration_ms(run: Run) -> int | None:
    """Since a process was first started for it; None before that."""
    if run.started_at is None:
        return None
    end = datetime.fromisoformat(run.ended_at) if run.ended_at else datetime.now(UTC)
    return max(0, round((end - datetime.fromisoformat(run.started_at)).total_seconds() * 1000))
