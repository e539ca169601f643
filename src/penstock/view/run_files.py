"""What the files of a run folder say: its config, its status, the metrics of every step and the alarms among its events.

Metrics and events are read once and then only as far as they have grown, so that a page of a long run stays cheap.
"""

import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import orjson

from penstock.config import PoolSection
from penstock.errors import ConfigError
from penstock.pool import POOLS
from penstock.pool.location import PoolLocation
from penstock.run.folder import COMPONENT, RunFolder, component_values
from penstock.run.shortfalls import NoticeCounts
from penstock.system.files import lock_is_held, remove_checksum

QUIET_S = 60.0
"""A run without a summary whose files have not changed for so long, and that nobody has locked, was interrupted."""
CURVES = (
    "reward", "entropy", "kl_behaviour", "kl_reference", "logprob_gap", "staleness", "staleness_max", "loss", "grad_norm",
    "clip_fraction", "ratio", "rollout_s", "train_s", "tokens_per_s", "exact_token_rate", "groups_equal", "groups", "groups_stale",
    "version", "rollouts", "served_share", "peak_memory_mb",
)  # fmt: skip
"""Numbers of a step that become curves, by their names in `metrics.jsonl`."""
GROWTH = ("total_rollouts", "total_tokens")
"""Curves of what a run has trained so far."""
TOTALS = ("masked", "inexact", "breaks", "ends")
"""Counts by reason that are added up over all steps."""
MAX_LINE = 16 << 20
"""Bytes of a line that is read; a longer one is counted as damaged."""


RUN_NAMES = ("config.json", "events.jsonl", "metrics.jsonl", "summary.json", "evals.json", "pool.db", "pool.db-wal")


BLOCK_BYTES = 4 << 20


class GrowingFile:
    """Reads the lines that were added to a file since the last look. A file that was replaced is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self.read_bytes = 0, 0

    def new_lines(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Returns whether the file is another than before, and its new whole lines with their positions."""
        start = self.read_bytes
        again, blocks = self.new_blocks()
        lines = list[tuple[int, bytes]]()
        start = 0 if again else start
        for block in blocks:
            for line in block.split(b"\n")[:-1]:
                lines.append((start, line + b"\n"))
                start += len(line) + 1
        return again, lines

    def new_blocks(self) -> tuple[bool, Iterator[bytes]]:
        """Returns whether the file is another than before, and its new whole lines, many at once."""
        try:
            stat = self._path.stat()
        except OSError:
            again, self._inode, self.read_bytes = self._inode != 0, 0, 0
            return again, iter(())
        again = (stat.st_ino, stat.st_size >= self.read_bytes) != (self._inode, True)
        if again:
            self._inode, self.read_bytes = stat.st_ino, 0
        return again, self._blocks()

    def _blocks(self) -> Iterator[bytes]:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self.read_bytes)
            rest = b""
            while content := file.read(BLOCK_BYTES):
                whole, newline, rest = (rest + content).rpartition(b"\n")  # the last line may be being written still
                if newline:
                    self.read_bytes += len(whole) + 1
                    yield whole + newline


class MetricsTable:
    """The steps of a training run as columns, kept up to date with `metrics.jsonl`."""

    def __init__(self, folder: Path, key: str) -> None:
        self._file, self._path, self._key = GrowingFile(folder / "metrics.jsonl"), folder / "metrics.jsonl", key
        self._clear()

    def _clear(self) -> None:
        self.steps: list[int] = []
        self.columns: dict[str, list[float | None]] = {name: [] for name in (*CURVES, "margin", "length", *GROWTH)}
        self._positions: dict[int, int] = {}
        self.totals: dict[str, Counter[str]] = {name: Counter() for name in TOTALS}
        self.tokens = Counter[str]()
        self.planned: int | None = None
        self.damaged = 0

    def refresh(self) -> None:
        again, lines = self._file.new_lines()
        if again:
            self._clear()
        for position, line in lines:
            try:
                entry = orjson.loads(remove_checksum(line, self._key)) if len(line) < MAX_LINE else None
                self._add(position, cast("dict[str, Any]", entry))
            except (ValueError, KeyError, TypeError, AttributeError):
                self.damaged += 1

    def _add(self, position: int, entry: dict[str, Any]) -> None:
        step = entry["step"]
        if not isinstance(step, int):
            raise ValueError("a step has a number")
        values = {name: _number(entry.get(name)) for name in CURVES}
        rewards = [reward for reward in entry.get("rewards", []) if isinstance(reward, int | float)]
        values["margin"] = _margin(rewards)
        rollouts, sampled = values["rollouts"], _number(entry.get("sampled_tokens"))
        values["length"] = sampled / rollouts if sampled is not None and rollouts else None
        for name, mean in component_values(entry).items():
            key = f"{COMPONENT}{name}"
            self.columns.setdefault(key, [0.0] * len(self.steps))
            values[key] = _number(mean)
        for name, total in self.totals.items():
            counted: dict[str, int] = entry.get(name) or {}
            total.update({str(key): int(n) for key, n in counted.items()})
        for name in ("sampled_tokens", "exact_tokens", "trained_tokens", "unhashed_tokens"):
            self.tokens[name] += int(entry.get(name) or 0)
        values["total_tokens"] = self.tokens["sampled_tokens"]
        values["total_rollouts"] = (self._last("total_rollouts") or 0) + (rollouts or 0)
        self.planned = entry.get("steps", self.planned)
        self.steps.append(step)
        self._positions[step] = position
        for name, column in self.columns.items():
            column.append(values.get(name, 0.0 if name.startswith(COMPONENT) else None))

    def _last(self, name: str) -> float | None:
        return self.columns[name][-1] if self.steps else None

    def entry(self, step: int) -> dict[str, Any] | None:
        """Returns the whole line of one step; None if there is none."""
        position = self._positions.get(step)
        if position is None:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(position)
                return orjson.loads(remove_checksum(file.readline(MAX_LINE), self._key))
        except (OSError, ValueError):
            return None

    def step_of(self, group_id: str) -> int | None:
        """Returns the step that trained a group."""
        named = orjson.dumps(group_id)
        try:
            with self._path.open("rb") as file:
                for line in file:
                    if named in line and len(line) < MAX_LINE:
                        entry = orjson.loads(remove_checksum(line, self._key))
                        if group_id in entry.get("group_ids", ()):
                            return entry["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class AlarmLog:
    """The events that a person should know of, counted by kind, the newest kept; and what gateways did not do as asked."""

    KINDS: ClassVar[dict[str, str]] = {
        "code.changed": "the code of the agent or grader changed",
        "record.damaged": "a record is damaged",
        "checkpoint.damaged": "a checkpoint is damaged",
        "checkpoint.fallback": "the run went on from an earlier checkpoint",
        "rollout.forged": "a rollout was graded by something else than the run's grader",
        "rollout.misreported": "an agent reported another conversation than was sampled",
        "rollout.direct_calls": "an agent called a provider directly, past the gateway",
        "rollout.strays": "an agent called a provider directly, past the gateway",
        "artifacts.lost": "artifacts could not be kept",
        "artifacts.left_out": "artifacts were left out",
        "agent.abandoned": "an agent did not end after its cancellation",
        "guest.abandoned": "an agent did not end after its cancellation",
        "group.drop": "a group was dropped",
        "pool.full": "the pool was full",
        "update.skip": "updates of a step were skipped",
        "eval.fail": "a held-out evaluation failed",
        "eval.skip": "a held-out evaluation was skipped",
        "worker.lost": "a worker was lost",
        "trainer.lost": "the trainer was lost",
        "rollouter.lost": "the rollouter was lost",
        "executor.server_down": "a rollout server was down",
        "grading.refused": "a grade was refused",
        "train.wait": "the trainer waited long",
        "train.alarm": "the metrics say that the run goes wrong",
        "notice": "notice",
    }
    KEPT: ClassVar[int] = 50

    def __init__(self, folder: Path) -> None:
        self._file = GrowingFile(folder / "events.jsonl")
        self._wanted = re.compile(
            rb'"kind":"(?:%b)"' % b"|".join(re.escape(kind.encode()) for kind in (*self.KINDS, *NoticeCounts.KINDS))
        )
        self.counts, self.newest = Counter[str](), deque[dict[str, Any]](maxlen=self.KEPT)
        self.notices = NoticeCounts()

    def refresh(self) -> None:
        again, blocks = self._file.new_blocks()
        if again:
            self.counts.clear()
            self.newest.clear()
            self.notices.clear()
        for line in (line for block in blocks for line in self._lines(block)):
            if not (event := parse_event(line)):
                continue
            self.notices.add(event)
            if event["kind"] in self.KINDS:
                self.counts[event["kind"]] += 1
                text = event.get("text") or event.get("message") or event.get("reason") or event.get("path") or ""
                about = event.get("rollout_id") or event.get("group_id") or event.get("step") or ""
                self.newest.append({"time": event["time"], "kind": event["kind"], "about": about, "text": str(text)[:500]})

    def _lines(self, block: bytes) -> Iterator[bytes]:
        """Yields the lines that may be alarms; the others are never cut out, as a long run has millions."""
        end = 0
        for match in self._wanted.finditer(block):
            if match.start() >= end:
                end = block.index(b"\n", match.start()) + 1
                yield block[block.rfind(b"\n", 0, match.start()) + 1 : end]


def _margin(rewards: Sequence[float]) -> float | None:
    """Returns 1.96 standard errors of the mean. `statistics.stdev` takes ten times as long, as it counts in fractions."""
    count = len(rewards)
    if count < 2:
        return None
    mean = math.fsum(rewards) / count
    return 1.96 * math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1) / count)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Returns an event with its time and kind; None for a line that is none."""
    try:
        event: Any = orjson.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict):
        return None
    named = cast("dict[str, Any]", event)
    return named if isinstance(named.get("time"), int | float) and isinstance(named.get("kind"), str) else None


@dataclass(slots=True)
class ViewedRun:
    """One run folder, with what was read of it so far."""

    path: Path
    settings: dict[str, Any]
    """The content of `config.json`; empty for a folder with a pool alone."""
    metrics: MetricsTable
    alarms: AlarmLog
    is_ours: bool = True
    """See `RunPlace`."""
    stamp: int = 0
    """When `config.json` was written: another one is another run."""
    folder: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.path, resumed=True)

    @property
    def config(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.settings.get("config") or {})

    def setting(self, section: str, key: str) -> Any:
        """Returns one value of the config; None if it has none."""
        found: Any = self.config.get(section)
        return cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None

    @property
    def kind(self) -> str:
        return "train" if self.metrics.steps else self.folder.kind

    def summary(self) -> dict[str, Any]:
        """Returns `summary.json`, or nothing if there is none or it is damaged."""
        try:
            return self.folder.summary() or {}
        except ConfigError:
            return {}

    def heldout(self) -> list[dict[str, Any]]:
        """Returns the held-out rewards by step."""
        try:
            found = self.folder.evaluations()
        except ConfigError:
            return []
        named = [(*when.rpartition("-")[::2], reward) for when, reward in found.items()]
        return sorted(
            ({"step": int(step), "when": when, "reward": reward} for when, step, reward in named if step.isdecimal()),
            key=lambda each: each["step"],
        )

    @property
    def pool(self) -> PoolLocation:
        section = cast("dict[str, Any]", self.config.get("pool") or {})
        name = section.get("name", PoolSection().name)
        return PoolLocation(
            name if name in ("sqlite", "postgres", "memory") else PoolSection().name, self.path, section.get("url", "")
        )

    def why_no_pool(self) -> str | None:
        """Says why there is no pool to read; None if there may be one."""
        if not self.is_ours and self.pool.name != "sqlite":
            return "its pool is in a database, named by the run itself; open it with `penstock view` where the run was made"
        return POOLS.load(self.pool.name).why_unreadable(self.path)

    def changed(self) -> float:
        """Returns when a file of the run last changed, in seconds since 1970."""
        return max((stat.st_mtime for name in RUN_NAMES if (stat := _stat(self.path / name))), default=0.0)

    def fingerprint(self) -> str:
        """Returns a text that is another one whenever something to show may have changed."""
        stats = [_stat(self.path / name) for name in RUN_NAMES]
        return " ".join("-" if stat is None else f"{stat.st_size}.{stat.st_mtime_ns}" for stat in stats) + self.status()

    def status(self) -> str:
        """`running`, `finished`, `stopped` (it can be resumed), or `interrupted`: it was killed, or its machine died."""
        held = [lock_is_held(self.path / name) for name in (".lock", ".gateway.lock")]
        if any(held):
            return "running"
        if status := self.summary().get("status"):
            return str(status)
        recent = time.time() - self.changed() < QUIET_S
        return "running" if None in held[:1] and recent else "interrupted"

    def refresh(self) -> None:
        self.metrics.refresh()
        self.alarms.refresh()


def open_viewed_run(path: Path) -> ViewedRun:
    """Opens a folder that holds a run, or a pool alone; ConfigError if it is neither."""
    settings, found = dict[str, Any](), (path / "config.json").exists()
    if found:
        try:
            settings = RunFolder(path, resumed=True).settings()
        except ConfigError:
            settings = _foreign_settings(path)
    if not settings and not (path / "pool.db").exists():
        raise ConfigError(
            f"{path}: not a run folder; give one that `penstock train`, `eval run` or `gateway` made, or their parent"
        )
    return ViewedRun(path, settings, MetricsTable(path, str(settings.get("id", ""))), AlarmLog(path))


def is_run(path: Path) -> bool:
    """Whether the folder looks like a run's: it has its own config.json, or a pool. A checkpoint has a config.json too."""
    return (path / "pool.db").is_file() or ((path / "config.json").is_file() and (path / "events.jsonl").is_file())


def _foreign_settings(path: Path) -> dict[str, Any]:
    """Returns the settings of a gateway's folder, which has no datasets."""
    try:
        found: Any = orjson.loads((path / "config.json").read_bytes())
        return found if isinstance(found, dict) and isinstance(found.get("config"), dict) else {}  # pyright: ignore
    except (OSError, ValueError):
        return {}


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None
