"""What a training run has come to so far: its metrics under the platform's names."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from penstock.train.folder import RunFolder

Stamp = tuple[tuple[int, int], ...]
"""When files were last written, and their sizes."""
REMEMBERED = 200
LINE_AT_MOST = 64 << 20
"""Bytes of events that are read at once."""

NAMES = {
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


class Point(NamedTuple):
    """A value after a step."""

    step: int
    value: float
    timestamp: int
    """Milliseconds since 1970."""


@dataclass(slots=True)
class Times:
    """When steps and held-out evaluations ended, from the event log; read on from where the last reading stopped."""

    offset: int = 0
    steps: dict[int, float] = field(default_factory=dict[int, float])
    evals: dict[str, float] = field(default_factory=dict[str, float])

    def read_on(self, file: Path) -> None:
        """Take in what was added. A line that is being written is left for the next time."""
        if not file.exists() or file.stat().st_size <= self.offset:
            return
        with file.open("rb") as lines:
            lines.seek(self.offset)
            part = lines.read(LINE_AT_MOST)
        whole = part[: part.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            if b'"kind":"train.step"' in line[:80] or b'"kind":"eval.end"' in line[:80]:
                event = orjson.loads(line)
                if event["kind"] == "train.step":
                    self.steps[event["step"]] = event["time"]
                else:
                    self.evals[f"{event['when']}-{event['step']}"] = event["time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A training run in numbers."""

    curves: dict[tuple[str, str], list[Point]]
    """By key and title."""
    step: int
    steps: int | None
    """None before the first."""
    reward: float | None
    """Of the last step."""
    examples: int
    """Tasks whose groups were trained."""

    def metrics(self) -> list[dict[str, Any]]:
        """As the platform gives them."""
        return [
            {"metric_key": key, "title": title, "data_points": [point._asdict() for point in points]}
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


class Trainings:
    """Reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[Path, Times] = OrderedDict()
        self._read: dict[Path, tuple[Stamp, Trained]] = {}

    def read(self, path: Path) -> Trained:
        """Of the run in this folder, which may not be there yet. What has not changed is not read again; ask in a thread."""
        stamp = tuple(_stamp(path / name) for name in ("metrics.jsonl", "evals.json", "events.jsonl"))
        with self._lock:
            known, trained = self._read.get(path, ((), None))
            if trained is None or known != stamp:
                trained = self._trained(path)
                self._read[path] = (stamp, trained)
            return trained

    def _trained(self, path: Path) -> Trained:
        folder = RunFolder(path, resumed=True)
        times = self._times.setdefault(path, Times())
        while len(self._times) > REMEMBERED:
            forgotten, _ = self._times.popitem(last=False)
            self._read.pop(forgotten, None)
        times.read_on(folder.events)
        entries = folder.metrics()
        last: dict[str, Any] = entries[-1] if entries else {}
        return Trained(
            curves=_curves(entries, folder.evaluations(), times, _changed_at(path)),
            step=last.get("step", 0),
            steps=last.get("steps"),
            reward=last.get("reward"),
            examples=sum(entry.get("groups", 0) for entry in entries),
        )


def _curves(
    entries: list[dict[str, Any]], evals: dict[str, float | None], times: Times, otherwise: float
) -> dict[tuple[str, str], list[Point]]:
    curves: dict[tuple[str, str], list[Point]] = {}
    for entry in entries:
        at = _ms(times.steps.get(entry["step"], otherwise))
        rollouts = entry.get("rollouts")
        derived = {"response_length": entry["sampled_tokens"] / rollouts} if rollouts else {}
        for name, value in {**entry, **derived}.items():
            if name in NAMES and isinstance(value, (int, float)):
                curves.setdefault(NAMES[name], []).append(Point(entry["step"], float(value), at))
    held = [(int(when.rpartition("-")[2]), when, reward) for when, reward in evals.items() if reward is not None]
    points = [Point(step, reward, _ms(times.evals.get(when, otherwise))) for step, when, reward in sorted(held)]
    return curves | ({HELD_OUT: points} if points else {})


def _changed_at(path: Path) -> float:
    file = path / "metrics.jsonl"
    return file.stat().st_mtime if file.exists() else 0.0


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)
