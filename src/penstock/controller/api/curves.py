"""What a training run has come to so far: its metrics under the platform's names."""

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
"""When files were last written, and their sizes."""
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
    "rollout_s": ("perf/rollout_s", "Seconds of rollouts"),
    "train_s": ("perf/train_s", "Seconds of the update"),
}
"""Of a step's metrics: the platform's key where it has one, else one of the same form."""
HELD_OUT = ("eval/validation/reward", "Held-out reward")


class CurvePoint(NamedTuple):
    """A value after a step."""

    step: int
    value: float
    of: int | str
    """What was measured, by which its time is known: the step, or an evaluation such as `during-8`."""


Curves = dict[tuple[str, str], list[CurvePoint]]
"""By key and title."""


@dataclass(slots=True)
class EventTimes:
    """When steps and held-out evaluations ended, from the event log; read on from where the last reading stopped."""

    offset: int = 0
    ends: dict[int | str, float] = field(default_factory=dict[int | str, float])

    def read_on(self, file: Path) -> None:
        """Take in what was added."""
        for line in _complete_lines(file, self.offset):
            self.offset += len(line)
            if b'"kind":"train.step"' in line[:80] or b'"kind":"eval.end"' in line[:80]:
                event = orjson.loads(line)
                of = event["step"] if event["kind"] == "train.step" else f"{event['when']}-{event['step']}"
                self.ends[of] = event["time"]


@dataclass(slots=True)
class StepMetrics:
    """What the steps came to, from the metrics; read on from where the last reading stopped."""

    offset: int = 0
    read: bytes = b""
    """The line before `offset`. A file in which it stands elsewhere, or no more, was cut or written anew."""
    last: dict[str, Any] = field(default_factory=dict[str, Any])
    """The last step's metrics."""
    curves: Curves = field(default_factory=Curves)
    examples: int = 0

    def read_on(self, file: Path) -> "StepMetrics":
        """With what was added; read from the beginning where the file is not the one that was read."""
        lines = _complete_lines(file, self.offset - len(self.read))
        if self.read and next(lines, b"") != self.read:
            return StepMetrics().read_on(file)
        for line in lines:
            if line.endswith(b"}\n"):
                self._add(orjson.loads(line))
            self.offset, self.read = self.offset + len(line), line
        return self

    def _add(self, entry: dict[str, Any]) -> None:
        step, rollouts = entry["step"], entry.get("rollouts")
        derived = {"response_length": entry["sampled_tokens"] / rollouts} if rollouts else {}
        for name, value in {**entry, **derived}.items():
            if name in METRIC_NAMES and isinstance(value, (int, float)):
                self.curves.setdefault(METRIC_NAMES[name], []).append(CurvePoint(step, float(value), step))
        self.last = entry
        self.examples += entry.get("groups", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """A training run in numbers."""

    curves: Curves
    ends: dict[int | str, float]
    """When what was measured ended, in seconds since 1970."""
    otherwise: float
    """When the rest did, as far as is known."""
    step: int
    steps: int | None
    """None before the first."""
    reward: float | None
    """Of the last step."""
    examples: int
    """Tasks whose groups were trained."""

    def metrics(self) -> list[dict[str, Any]]:
        """As the platform gives them; timestamps are milliseconds since 1970."""
        at = {of: round(seconds * 1000) for of, seconds in self.ends.items()}
        rest = round(self.otherwise * 1000)
        return [
            {
                "metric_key": key,
                "title": title,
                "data_points": [{"step": step, "value": value, "timestamp": at.get(of, rest)} for step, value, of in points],
            }
            for (key, title), points in self.curves.items()
        ]

    def summaries(self) -> list[dict[str, Any]]:
        """Of each curve: where it began, where it is, and between what."""
        found: list[dict[str, Any]] = []
        for (key, title), points in self.curves.items():
            values = [point.value for point in points]
            ends = {"initial": values[0], "latest": values[-1], "delta": values[-1] - values[0]}
            found.append({"key": key, "title": title, **ends, "min": min(values), "max": max(values)})
        return found


class TrainingReader:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[Path, EventTimes] = OrderedDict()
        self._steps: dict[Path, StepMetrics] = {}
        self._read: dict[Path, tuple[FileStamps, TrainingProgress]] = {}

    def read(self, path: Path) -> TrainingProgress:
        """Of the run in this folder, which may not be there yet. What has not changed is not read again; ask in a thread."""
        stamp = tuple(_stamp(path / name) for name in ("metrics.jsonl", "evals.json", "events.jsonl"))
        with self._lock:
            known, trained = self._read.get(path, ((), None))
            if trained is None or known != stamp:
                trained = self._trained(path)
                self._read[path] = (stamp, trained)
            return trained

    def _trained(self, path: Path) -> TrainingProgress:
        folder = RunFolder(path, resumed=True)
        times = self._times.setdefault(path, EventTimes())
        while len(self._times) > MAX_CACHED:
            forgotten, _ = self._times.popitem(last=False)
            self._read.pop(forgotten, None)
            self._steps.pop(forgotten, None)
        times.read_on(folder.events)
        steps = self._steps[path] = self._steps.get(path, StepMetrics()).read_on(path / "metrics.jsonl")
        return TrainingProgress(
            curves={name: points.copy() for name, points in steps.curves.items()} | _held_out_curve(folder.evaluations()),
            ends=times.ends.copy(),
            otherwise=_changed_at(path),
            step=steps.last.get("step", 0),
            steps=steps.last.get("steps"),
            reward=steps.last.get("reward"),
            examples=steps.examples,
        )


def _held_out_curve(evals: dict[str, float | None]) -> Curves:
    points = [CurvePoint(int(of.rpartition("-")[2]), reward, of) for of, reward in evals.items() if reward is not None]
    return {HELD_OUT: sorted(points, key=lambda point: (point.step, point.of))} if points else {}


def _complete_lines(file: Path, offset: int) -> Iterator[bytes]:
    """From there on; one that is being written is left for the next time."""
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
