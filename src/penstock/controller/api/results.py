"""Where a run's numbers are read: one reader for each kind of run, shared by all routes."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.controller.api.curves import Trained, Trainings
from penstock.controller.api.progress import Evaluations, Seen, eval_section
from penstock.controller.api.scores import overview, passes, results, reward_stats
from penstock.controller.runs import Run, RunFiles
from penstock.controller.stations import Controller
from penstock.errors import ControllerError


class Results:
    """Of all runs of a controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._evaluations = Evaluations()
        self._trainings = Trainings()

    def files(self, run: Run) -> RunFiles:
        """The run's own."""
        return RunFiles(self._controller.home.runs / run.id)

    async def seen(self, run: Run) -> Seen | None:
        """What an evaluation has tried; None before it has begun."""
        return await self._evaluations.read(run, self.files(run))

    async def trained(self, run: Run) -> Trained:
        """What a training run has come to."""
        return await asyncio.to_thread(self._trainings.read, self.files(run).results(run))

    async def results(self, run: Run) -> dict[str, Any] | None:
        """`results` of an evaluation; None before it has begun."""
        seen = await self.seen(run)
        if seen is None:
            return None
        files = self.files(run)
        rows = await asyncio.to_thread(self._dataset_rows, run.submission.dataset)
        resumed = (await asyncio.to_thread(summary, files, run)).get("resumed")
        return results(seen, eval_section(files), dataset_rows=rows, resumed=resumed)

    async def evaluation_metrics(self, run: Run) -> dict[str, Any]:
        """Of an evaluation, as the platform gives them; nothing tried yet is told as such."""
        files, seen = self.files(run), await self.seen(run) or Seen()
        section, tried = eval_section(files), seen.ordered()
        return {
            "eval_run_id": run.id,
            "status": run.status,
            "overview": overview(seen, section, duration_ms=duration_ms(run)),
            "reward_stats": reward_stats(tried),
            "pass_at_k": [{"k": k, "value": value} for k, value in passes(tried, section).items()],
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


def summary(files: RunFiles, run: Run) -> dict[str, Any]:
    """What the run's process last wrote of itself; empty before that."""
    try:
        return orjson.loads((files.results(run) / "summary.json").read_bytes())
    except (OSError, ValueError):
        return {}


def settings(files: RunFiles) -> dict[str, Any]:
    """The whole config of a run."""
    try:
        return orjson.loads(files.config.read_bytes())
    except (OSError, ValueError):
        return {}


def planned_steps(files: RunFiles) -> int | None:
    """Of training, as it was asked for."""
    return settings(files).get("train", {}).get("steps")


def duration_ms(run: Run) -> int | None:
    """Since a process was first started for it; None before that."""
    if run.started_at is None:
        return None
    end = datetime.fromisoformat(run.ended_at) if run.ended_at else datetime.now(UTC)
    return max(0, round((end - datetime.fromisoformat(run.started_at)).total_seconds() * 1000))
