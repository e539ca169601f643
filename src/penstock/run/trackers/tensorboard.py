"""TensorBoard: event files in the run's folder."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.run.trackers.base import RolloutTrace, TrackedRun, Tracker, TrackerStart, load_package


class TensorboardTracker(Tracker):
    modules = ("tensorboardX",)
    extra = "tensorboard"

    _writer: Any

    def start(self, run: TrackedRun) -> TrackerStart:
        folder = run.folder / "tensorboard"
        # Readers forget what was written of `purge_step` and later. Files are named by the second: of a run that is taken up within
        # one, the first would be overwritten. Readers take them in the order of their names.
        self._writer = load_package("tensorboardX").SummaryWriter(
            str(folder), purge_step=run.first_step if run.id else None, filename_suffix=f".{time.time_ns()}"
        )
        return TrackerStart(str(folder), f"tensorboard --logdir {run.folder.parent}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        for place, trace in enumerate(traces):
            labels = "\n".join(f"- {name}: `{value}`" for name, value in trace.labels.items())
            self._writer.add_text(f"rollouts/{place}", f"{labels}\n\n{_code(trace.text())}", step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """As a code block of Markdown, in which nothing has a meaning."""
    return "\n".join(f"    {line}" for line in text.splitlines())
