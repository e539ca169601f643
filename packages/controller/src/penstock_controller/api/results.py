"""The platform's JSON views of runs: lists, details, results and trajectories."""

import asyncio
import statistics
from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.config import EvalSection, PoolSection
from penstock.errors import ControllerError
from penstock.evals.metrics import pass_at_k
from penstock.evals.spending import rollout_usage
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.records import End, Rollout, Task
from penstock.rollout.transcripts import transcripts
from penstock.run.shortfalls import ScoredEnd, shortfalls, shortfalls_json
from penstock.system.files import read_inside, write_file
from penstock_controller.api.bodies import as_object
from penstock_controller.api.curves import TrainingProgress, TrainingReader
from penstock_controller.context import Controller
from penstock_controller.identity import OWNER
from penstock_controller.runs import Run, RunFiles

NOT_SHOWN = ("experiment", "env", "secrets", "model", "agent", "dataset", "run")
"""Tables that a detail shows elsewhere, or not at all."""


def accepted(run: Run) -> dict[str, Any]:
    return {"id": run.id, "name": run.name, "status": run.status, "created_at": run.created_at}


def eval_row(run: Run, results: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    return {**_scalars(run), **_references(run), "results": results, "config": _eval_config(run, settings)}


def eval_detail(run: Run, results: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    config = _eval_config(run, settings)
    return {"eval_run": _scalars(run), "config": config, "results": results, **_references(run), **_origin(run)}


def training_row(run: Run, progress: TrainingProgress, steps: int | None) -> dict[str, Any]:
    """Returns the view in a list; `steps` is the planned number."""
    return {**_scalars(run), **_references(run), **_progress(progress, steps)}


def training_detail(run: Run, progress: TrainingProgress, steps: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    more = {"examples_processed_count": progress.examples, "notes": run.message or None}
    scalars = {**_scalars(run), **_progress(progress, steps), **more}
    return {"training_run": scalars, "config": _training_config(run, settings), **_references(run), **_origin(run)}


def _scalars(run: Run) -> dict[str, Any]:
    return {
        **accepted(run),
        "started_at": run.started_at,
        "completed_at": run.ended_at,
        "creator_name": run.submission.creator or None,
        "creator_email": None,
        "message": run.message or None,
        "stop_asked": run.stop_asked,
        "launches": run.launches,
    }


def _references(run: Run) -> dict[str, Any]:
    """Lists and details use different key names; each reference has all of them."""
    model, dataset, rollout = run.submission.model, run.submission.dataset, run.submission.rollout
    return {
        "model": {"id": model, "name": model, "model_name": model},
        "dataset": {"id": dataset, "name": dataset, "file_name": dataset, "digest": run.submission.dataset_digest},
        "rollout": {"id": rollout, "name": rollout},
    }


def _origin(run: Run) -> dict[str, Any]:
    submitted = run.submission
    return {
        "entrypoint": submitted.entrypoint,
        "repository": submitted.repository or None,
        "branch": submitted.branch,
        "commit_sha": submitted.commit_sha,
        "dirty": submitted.dirty,
        "snapshot": submitted.snapshot,
        "env_config": submitted.env,
        "resolved_secret_scopes": submitted.secrets,
        "is_internal_user": False,
    }


def _progress(progress: TrainingProgress, steps: int | None) -> dict[str, Any]:
    return {"current_step": progress.step, "total_steps": progress.steps or steps, "reward": progress.reward}


def _eval_config(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the submitted `[evaluation]` table, or else `[eval]`, plus model and attempts per row."""
    section: dict[str, Any] = settings.get("eval", {})
    table = as_object(run.submission.tables.get("evaluation")) or {key: value for key, value in section.items() if key != "samples"}
    return {**_plain(table), "model_path": run.submission.model, "n": section.get("samples", 1)}


def _training_config(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    submitted = {key: _plain(as_object(table)) for key, table in run.submission.tables.items() if key not in NOT_SHOWN}
    tables = {key: table for key, table in submitted.items() if table}
    return {"model_path": run.submission.model, **(tables or {"train": _plain(settings.get("train", {}))})}


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """Returns the table without unset values."""
    return {key: value for key, value in table.items() if value is not None and value != ""}


def trajectory(run: Run, row: int, task: Task, attempt: Rollout) -> bytes:
    """Returns an attempt as JSON: transcripts with messages and tools, grades, and model calls with tokens and time."""
    by_name, spent = transcripts(attempt), rollout_usage(attempt)
    first = next(iter(by_name.values()), None)
    content: dict[str, Any] = {
        "eval_run": {"id": run.id, "name": run.name},
        "row": row,
        "run": attempt.ref.place,
        "rollout_id": attempt.ref.id,
        "task": {"id": task.id, "prompt": task.prompt, "label": task.label, "metadata": task.metadata},
        "end": attempt.end,
        "message": attempt.message,
        "reward": attempt.reward,
        "grades": [{"source": g.source, "reward": g.reward, "transcript": g.transcript, "step": g.step} for g in attempt.grades],
        "messages": first.messages if first else [],
        "transcripts": {name: {"messages": each.messages, "tools": each.tools} for name, each in by_name.items()},
        "calls": _calls(attempt),
        "tokens": {"prompt": spent.prompt_tokens, "sampled": spent.completion_tokens},
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def _calls(attempt: Rollout) -> list[dict[str, Any]]:
    return [
        {
            "index": step.index,
            "transcript": step.transcript,
            "finish": step.finish,
            "sampled_tokens": step.sampled,
            "seconds": step.seconds,
            "temperature": step.sampling.temperature,
        }
        for step in attempt.steps
    ]


MAX_CACHED = 200
"""Evaluations whose progress is kept in memory."""
RETRIED_ENDS = (End.CANCELLED, End.LOST)
"""Attempts with these ends are repeated when the evaluation is resumed, so they do not count."""


class AttemptSummary(NamedTuple):
    """An attempt that has ended. The field order is that of attempts.json."""

    rollout_id: str
    row: int
    place: int
    end: str
    reward: float
    """0 for a failed attempt."""
    message: str
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    """Total time of its model calls."""


@dataclass(slots=True)
class EvaluationProgress:
    """What was read of an evaluation's pool so far."""

    position: int = 0
    """Position of the last change that was read."""
    rows: set[int] = field(default_factory=set[int])
    """Rows of all opened groups."""
    attempts: dict[tuple[int, int], AttemptSummary] = field(default_factory=dict[tuple[int, int], AttemptSummary])
    """The last attempt by row and place in the group."""

    def ordered(self, rows: Container[int] | None = None) -> list[AttemptSummary]:
        """Returns the attempts that count, sorted by row and place."""
        found = [each for _, each in sorted(self.attempts.items()) if each.end not in RETRIED_ENDS]
        return found if rows is None else [each for each in found if each.row in rows]


class RunResults:
    """Results of all runs of a controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._evaluations = EvaluationReader()
        self._trainings = TrainingReader()

    def files(self, run: Run) -> RunFiles:
        return RunFiles(self._controller.home.runs / run.id)

    async def evaluation(self, run: Run) -> EvaluationProgress | None:
        """Returns the progress of an evaluation; None before it has started."""
        return await self._evaluations.read(run, self.files(run))

    async def training(self, run: Run) -> TrainingProgress:
        """Returns the progress of a training run."""
        return await asyncio.to_thread(self._trainings.read, self.files(run).results(run))

    async def results(self, run: Run) -> dict[str, Any] | None:
        """Returns `results` of an evaluation; None before it has started."""
        progress = await self.evaluation(run)
        if progress is None:
            return None
        files = self.files(run)
        rows = await asyncio.to_thread(self._dataset_rows, run.submission.dataset)
        resumed = (await asyncio.to_thread(run_summary, files, run)).get("resumed")
        return eval_results(progress, eval_section(files), dataset_rows=rows, resumed=resumed)

    async def evaluation_metrics(self, run: Run) -> dict[str, Any]:
        """Returns the metrics of an evaluation in the platform's form, also before it has started."""
        files, progress = self.files(run), await self.evaluation(run) or EvaluationProgress()
        section, attempts = eval_section(files), progress.ordered()
        return {
            "eval_run_id": run.id,
            "status": run.status,
            "overview": eval_overview(progress, section, duration_ms=duration_ms(run)),
            "reward_stats": reward_stats(attempts),
            "pass_at_k": [{"k": k, "value": value} for k, value in pass_at_k_values(attempts, section).items()],
        }

    async def training_metrics(self, run: Run) -> dict[str, Any]:
        """Returns the metrics of a training run in the platform's form."""
        progress = await self.training(run)
        overview = {
            "duration_ms": duration_ms(run),
            "latest_step": progress.step,
            "total_steps": progress.steps or planned_steps(self.files(run)),
            "examples_processed_count": progress.examples,
            "metric_summaries": progress.summaries(),
        }
        return {"training_run_id": run.id, "status": run.status, "overview": overview, "metrics": progress.metrics()}

    def _dataset_rows(self, name: str) -> int | None:
        try:
            return self._controller.datasets.get(name).rows
        except ControllerError:  # it was submitted with the code, or removed since
            return None


# Views of an evaluation.


def eval_results(
    progress: EvaluationProgress, section: EvalSection, *, dataset_rows: int | None, resumed: int | None
) -> dict[str, Any]:
    """Returns `results` of a run in lists and details. An attempt that was not graded counts as reward 0 in the score."""
    attempts = progress.ordered()
    stats = reward_stats(attempts)
    by_k = {str(k): value for k, value in pass_at_k_values(attempts, section).items()}
    return {
        "score": stats and stats["mean"],
        "total_runs": len(attempts),
        "sampled_rows": len(progress.rows),
        "total_dataset_rows": dataset_rows,
        **_counts(attempts, section),
        "skipped_reasons": _skipped_reasons(attempts),
        "shortfalls": _shortfalls(attempts, section),
        "total_tokens": _tokens(attempts),
        "resumed_count": resumed,
        "reward_stats": None if stats is None else stats | {"pass_at_k": by_k},
    }


def eval_overview(progress: EvaluationProgress, section: EvalSection, *, duration_ms: int | None) -> dict[str, Any]:
    """Returns `overview` of an evaluation's metrics."""
    attempts = progress.ordered()
    return {
        "duration_ms": duration_ms,
        "total_samples": len(progress.rows) * section.samples,
        "completed_samples": len(attempts),
        **_counts(attempts, section),
        "shortfalls": _shortfalls(attempts, section),
        "tokens_used": _tokens(attempts),
    }


def reward_stats(attempts: Sequence[AttemptSummary]) -> dict[str, float] | None:
    """Returns statistics of the attempts' rewards; None before the first attempt."""
    rewards = [each.reward for each in attempts]
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
    """Whether the attempt completed with a reward at or above the threshold."""
    return each.end == "completed" and each.reward >= section.passes


def pass_at_k_values(attempts: Sequence[AttemptSummary], section: EvalSection) -> dict[int, float]:
    """Returns pass@k by k, unbiased: the mean over rows whose attempts have all ended."""
    rows: dict[int, list[bool]] = {}
    for each in attempts:
        rows.setdefault(each.row, []).append(has_passed(each, section))
    complete = [row for row in rows.values() if len(row) == section.samples]
    return {k: statistics.fmean(pass_at_k(len(row), sum(row), k) for row in complete) for k in section.k if complete}


def _counts(attempts: Sequence[AttemptSummary], section: EvalSection) -> dict[str, Any]:
    """Returns how many were graded, and of these passed or failed. What was not graded is skipped: it says nothing of the model."""
    graded = [each for each in attempts if each.end == End.COMPLETED]
    right = sum(has_passed(each, section) for each in graded)
    return {
        "graded": len(graded),
        "passed": right,
        "failed": len(graded) - right,
        "skipped": len(attempts) - len(graded),
        "pass_rate": right / len(graded) if graded else None,
        "pass_threshold": section.passes,
    }


def _skipped_reasons(attempts: Sequence[AttemptSummary]) -> dict[str, dict[str, Any]]:
    """Returns the count and the most common message of each end other than completed."""
    messages: dict[str, Counter[str]] = {}
    for each in attempts:
        if each.end != End.COMPLETED:
            messages.setdefault(each.end, Counter())[each.message] += 1
    return {end: {"count": found.total(), "message": found.most_common(1)[0][0]} for end, found in messages.items()}


def _shortfalls(attempts: Sequence[AttemptSummary], section: EvalSection) -> dict[str, dict[str, Any]]:
    return shortfalls_json(shortfalls([ScoredEnd(each.end, each.message, each.reward) for each in attempts], section.passes))


def _tokens(attempts: Sequence[AttemptSummary]) -> int:
    return sum(each.prompt_tokens + each.sampled_tokens for each in attempts)


# Reading an evaluation's pool.


class EvaluationReader:
    """Reads the progress of evaluations; stores that of an ended one as attempts.json, since its pool is slower to read."""

    def __init__(self) -> None:
        self._progress: OrderedDict[str, EvaluationProgress] = OrderedDict()
        self._lock = asyncio.Lock()

    async def read(self, run: Run, files: RunFiles) -> EvaluationProgress | None:
        """Returns the progress; None before the run's process has created its pool."""
        stored = files.path / "attempts.json"
        async with self._lock:
            progress = self._progress.get(run.id)
            if progress is None:
                progress = await asyncio.to_thread(_load_progress, stored) or EvaluationProgress()
                self._progress[run.id] = progress
                while len(self._progress) > MAX_CACHED:
                    self._progress.popitem(last=False)
            if run.status.is_final and stored.exists():
                return progress
            pool = await asyncio.to_thread(open_pool, run, files)
            if pool is None:
                return None
            try:
                await _read_changes(pool, progress)
            finally:
                await pool.close()
            if run.status.is_final:
                with suppress(OSError):  # full disk: the pool is read again next time
                    await asyncio.to_thread(_save_progress, stored, progress)
            return progress


def open_pool(run: Run, files: RunFiles) -> Pool | None:
    """Opens the pool of a run; None if there is none yet.

    The config is the one that was submitted, not the copy in the run's own folder, which its code can change. A pool of the
    author's is not loaded here, and of others than the owner no pool elsewhere is opened.
    """
    folder, section = files.results(run), PoolSection.model_validate(run_settings(files).get("pool", {}))
    if section.name not in POOLS or (run.submission.person != OWNER and section.name != "sqlite"):
        return None
    if not all(files.holds(path) for path in (folder, *folder.glob("pool.db*"))):
        return None
    kind = POOLS.load(section.name)
    return None if kind.why_unreadable(folder) else kind(folder, url=section.url)


async def _read_changes(pool: Pool, progress: EvaluationProgress) -> None:
    while changes := await pool.changes(progress.position):
        for change in changes:
            if change.kind == "opened":
                progress.rows.add(_row(change.id))
            elif change.kind == "ended":
                attempt = _summarize(await pool.rollout(change.id))
                known = progress.attempts.get((attempt.row, attempt.place))
                if known is None or known.end in RETRIED_ENDS or attempt.end not in RETRIED_ENDS:
                    progress.attempts[attempt.row, attempt.place] = attempt
            progress.position = change.position


def _summarize(attempt: Rollout) -> AttemptSummary:
    rollout, spent = attempt.ref, rollout_usage(attempt)
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
        stored = orjson.loads(file.read_bytes())
        attempts = [AttemptSummary(*each) for each in stored["tried"]]
        return EvaluationProgress(stored["position"], set(stored["rows"]), {(each.row, each.place): each for each in attempts})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _save_progress(file: Path, progress: EvaluationProgress) -> None:
    attempts = [list(each) for each in progress.attempts.values()]
    write_file(file, orjson.dumps({"position": progress.position, "rows": sorted(progress.rows), "tried": attempts}))


# Reading a run's files.


def eval_section(files: RunFiles) -> EvalSection:
    """Returns the `[eval]` section of the run's config."""
    try:
        return EvalSection.model_validate(orjson.loads(files.config.read_bytes()).get("eval", {}))
    except (OSError, ValueError):
        return EvalSection()


def run_summary(files: RunFiles, run: Run) -> dict[str, Any]:
    """Returns summary.json of the run folder; empty if there is none yet."""
    try:
        return orjson.loads(read_inside(files.path, files.results(run) / "summary.json"))
    except (OSError, ValueError):
        return {}


def run_settings(files: RunFiles) -> dict[str, Any]:
    """Returns the complete config of a run."""
    try:
        return orjson.loads(files.config.read_bytes())
    except (OSError, ValueError):
        return {}


def planned_steps(files: RunFiles) -> int | None:
    return run_settings(files).get("train", {}).get("steps")


def duration_ms(run: Run) -> int | None:
    """Returns the time since the run was first started; None before that."""
    if run.started_at is None:
        return None
    end = datetime.fromisoformat(run.ended_at) if run.ended_at else datetime.now(UTC)
    return max(0, round((end - datetime.fromisoformat(run.started_at)).total_seconds() * 1000))
