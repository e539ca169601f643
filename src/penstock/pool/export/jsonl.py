"""A pool as JSON lines: a header, then each group followed by its rollouts, and a last line that marks the file as complete."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from penstock.codec import from_json, to_json
from penstock.errors import ConfigError
from penstock.pool.export.transfer import escape, unescape
from penstock.pool.paging import GroupHistory
from penstock.records import Attempt, Group
from penstock.system.files import creating

FORMAT = 1


@dataclass(slots=True)
class JsonlSink:
    out: BinaryIO
    groups: int = 0
    rollouts: int = 0

    def write(self, history: GroupHistory) -> None:
        _write(self.out, {"group": _fragment(replace(history.group, attempts=())), "trained": history.trained})
        for attempt in history.attempts:
            _write(self.out, {"rollout": _fragment(replace(attempt, message=escape(attempt.message)))})
        self.groups += 1
        self.rollouts += len(history.attempts)


@contextmanager
def open_export(path: Path, channels: Sequence[str]) -> Generator[JsonlSink]:
    with creating(path) as part, part.open("wb") as out:
        _write(out, {"penstock_pool": FORMAT, "channels": list(channels)})
        sink = JsonlSink(out)
        yield sink
        _write(out, {"whole": {"groups": sink.groups, "rollouts": sink.rollouts}})
        out.flush()


def read_export(path: Path) -> Iterator[GroupHistory]:
    with path.open("rb") as lines:
        head = _read_header(path, lines)
    if head.get("penstock_pool") != FORMAT:
        raise ConfigError(f"{path}: written by a newer penstock (format {head.get('penstock_pool')!r}); upgrade penstock")
    return _read(path)


def _read(path: Path) -> Iterator[GroupHistory]:
    reader = _JsonlReader(path)
    with path.open("rb") as lines:
        lines.readline()
        for number, line in enumerate(lines, 2):
            yield from reader.read_line(number, line)
    if not reader.complete:
        raise ConfigError(f"{path}: cut short after {reader.groups} groups, which are imported; take a whole copy for the rest")


@dataclass(slots=True)
class _JsonlReader:
    path: Path
    group: "_GroupLine | None" = None
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    groups: int = 0
    complete: bool = False

    def read_line(self, number: int, line: bytes) -> Iterator[GroupHistory]:
        """Read one line, and yield the group that it ends."""
        try:
            fields: dict[str, Any] = orjson.loads(line)
            if "rollout" in fields and self.group is not None:
                attempt = from_json(Attempt, orjson.dumps(fields["rollout"]))
                self.attempts.append(replace(attempt, message=unescape(attempt.message)))
                return
            head = None if "whole" in fields else _GroupLine(from_json(Group, orjson.dumps(fields["group"])), fields["trained"])
        except (ValueError, LookupError, TypeError, AttributeError) as cause:
            raise ConfigError(f"{self.path}: line {number} cannot be read ({cause}); export again") from cause
        if self.group is not None:
            self.groups += 1
            yield GroupHistory(group=self.group.group, attempts=tuple(self.attempts), trained=self.group.trained)
        self.group, self.attempts, self.complete = head, [], head is None


class _GroupLine(NamedTuple):
    group: Group
    trained: int | None


def _read_header(path: Path, lines: BinaryIO) -> dict[str, Any]:
    try:
        head: Any = orjson.loads(lines.readline())
    except ValueError:
        head = None
    if not (isinstance(head, dict) and "penstock_pool" in head):
        raise ConfigError(f"{path}: not an export of a pool; give what `penstock pool export --format jsonl` wrote")
    return head  # pyright: ignore[reportUnknownVariableType]


def _fragment(record: Any) -> orjson.Fragment:
    return orjson.Fragment(to_json(record))


def _write(out: BinaryIO, line: dict[str, Any]) -> None:
    out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
