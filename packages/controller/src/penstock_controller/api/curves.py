"""Progress of training runs: their metrics as curves, under the platform's names. Files are read incrementally."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.run.folder import RunFolder

FileStamps = tuple[tuple[int, int], ...]
"""Modification time and size of several files."""
MAX_CACHED = 200

METRIC_NAMES = {
    "reward": ("rollout/raw_reward", "Training reward"),
    "response_length": ("rollout/response_lengths", "Sampled tokens per rollout"),
    "entropy": ("train/entropy_loss", "Entropy"),
    "loss": ("train/loss", "Loss"),
    "grad_norm": ("train/grad_norm", "Gradient norm"),
    "kl_behaviour": ("train/kl_behaviour", "KL to the policy that sampled"),
    "kl_reference": ("train/kl_reference", "KL to the reference"),
    "clip_fraction": ("train/clip_fraction", "Clipped tokens"),
    "staleness": ("train/staleness", "Staleness in versions"),
    "exact_token_rate": ("rollout/exact_token_rate", "Exact tokens"),
    "tokens_per_s": ("perf/tokens_per_s", "Tokens per second"),
    "peak_memory_mb": ("perf/peak_memory_mb", "Peak memory, MB"),
    "rollout_s": ("perf/rollout_s", "Seconds of rollouts"),
    "train_s": ("perf/train_s", "Seconds of the update"),
}
"""Key and title of each metric: the platform's own where it has one, else one of the same form."""
HELD_OUT = ("eval/validation/reward", "Held-out reward")


class MetricPoint(NamedTuple):
    step: int
    value: float
    of: int | str
    """What was measured: a step, or an evaluation such as `during-8`. The key of its time."""


Curves = dict[tuple[str, str], list[MetricPoint]]
"""Points by metric key and title."""


@dataclass(slots=True)
class EventTimes:
    """End times of steps and held-out evaluations, from the event log."""

    offset: int = 0
    ends: dict[int | str, float] = field(default_factory=dict[int | str, float])

    def read_on(self, file: Path) -> None:
        """Reads what was added since the last call."""
        for line in _complete_lines(file, self.offset):
            self.offset += len(line)
            if b'"kind":"train.step"' in line[:80] or b'"kind":"eval.end"' in line[:80]:
                event = orjson.loads(line)
                of = event["step"] if event["kind"] == "train.step" else f"{event['when']}-{event['step']}"
                self.ends[of] = event["time"]


@dataclass(slots=True)
class StepMetrics:
    """Metrics of all steps, from metrics.jsonl."""

    offset: int = 0
    last_line: bytes = b""
    """The line before `offset`. If the file has another line there, it was truncated or rewritten."""
    last: dict[str, Any] = field(default_factory=dict[str, Any])
    """Metrics of the last step."""
    curves: Curves = field(default_factory=Curves)
    examples: int = 0

    def read_on(self, file: Path) -> "StepMetrics":
        """Reads what was added; starts again from the beginning if the file was truncated or rewritten."""
        lines = _complete_lines(file, self.offset - len(self.last_line))
        if self.last_line and next(lines, b"") != self.last_line:
            return StepMetrics().read_on(file)
        for line in lines:
            if line.endswith(b"}\n"):
                self._add(orjson.loads(line))
            self.offset, self.last_line = self.offset + len(line), line
        return self

    def _add(self, entry: dict[str, Any]) -> None:
        step, rollouts = entry["step"], entry.get("rollouts")
        derived = {"response_length": entry["sampled_tokens"] / rollouts} if rollouts else {}
        for name, value in {**entry, **derived}.items():
            if name in METRIC_NAMES and isinstance(value, (int, float)):
                self.curves.setdefault(METRIC_NAMES[name], []).append(MetricPoint(step, float(value), step))
        self.last = entry
        self.examples += entry.get("groups", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """The metrics of a training run so far."""

    curves: Curves
    ends: dict[int | str, float]
    """End times, in seconds since 1970."""
    default_end: float
    """Used for points without an end time."""
    step: int
    steps: int | None
    """Planned steps; None before the first one."""
    reward: float | None
    """The last step's."""
    examples: int
    """Groups that were trained."""

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the curves in the platform's form; timestamps are milliseconds since 1970."""
        ends_ms = {of: round(seconds * 1000) for of, seconds in self.ends.items()}
        default_ms = round(self.default_end * 1000)
        return [
            {
                "metric_key": key,
                "title": title,
                "data_points": [
                    {"step": step, "value": value, "timestamp": ends_ms.get(of, default_ms)} for step, value, of in points
                ],
            }
            for (key, title), points in self.curves.items()
        ]

    def summaries(self) -> list[dict[str, Any]]:
        """Returns first, last, minimum and maximum of each curve."""
        found: list[dict[str, Any]] = []
        for (key, title), points in self.curves.items():
            values = [point.value for point in points]
            ends = {"initial": values[0], "latest": values[-1], "delta": values[-1] - values[0]}
            found.append({"key": key, "title": title, **ends, "min": min(values), "max": max(values)})
        return found


class TrainingReader:
    """Reads the progress of training runs. Caches what it read, of a limited number of runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[Path, EventTimes] = OrderedDict()
        self._steps: dict[Path, StepMetrics] = {}
        self._progress: dict[Path, tuple[FileStamps, TrainingProgress]] = {}

    def read(self, path: Path) -> TrainingProgress:
        """Returns the progress of the run in this folder, which need not exist yet. Blocks on files: call it in a thread."""
        stamp = tuple(_stamp(path / name) for name in ("metrics.jsonl", "evals.json", "events.jsonl"))
        with self._lock:
            known, progress = self._progress.get(path, ((), None))
            if progress is None or known != stamp:
                progress = self._read_progress(path)
                self._progress[path] = (stamp, progress)
            return progress

    def _read_progress(self, path: Path) -> TrainingProgress:
        folder = RunFolder(path, resumed=True)
        times = self._times.setdefault(path, EventTimes())
        while len(self._times) > MAX_CACHED:
            dropped, _ = self._times.popitem(last=False)
            self._progress.pop(dropped, None)
            self._steps.pop(dropped, None)
        times.read_on(folder.events)
        steps = self._steps[path] = self._steps.get(path, StepMetrics()).read_on(path / "metrics.jsonl")
        return TrainingProgress(
            curves={name: points.copy() for name, points in steps.curves.items()} | _held_out_curve(folder.evaluations()),
            ends=times.ends.copy(),
            default_end=_changed_at(path),
            step=steps.last.get("step", 0),
            steps=steps.last.get("steps"),
            reward=steps.last.get("reward"),
            examples=steps.examples,
        )


def _held_out_curve(evals: dict[str, float | None]) -> Curves:
    points = [MetricPoint(int(of.rpartition("-")[2]), reward, of) for of, reward in evals.items() if reward is not None]
    return {HELD_OUT: sorted(points, key=lambda point: (point.step, point.of))} if points else {}


def _complete_lines(file: Path, offset: int) -> Iterator[bytes]:
    """Yields the lines from `offset` on, without a last one that is still being written."""
    if file.exists():
        with file.open("rb") as lines:
            lines.seek(offset)
            yield from takewhile(lambda line: line.endswith(b"\n"), lines)


def _changed_at(path: Path) -> float:
    file = path / "metrics.jsonl"
    return file.stat().st_mtime if file.exists() else 0.0


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)
