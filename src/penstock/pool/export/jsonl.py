"""A pool as JSON lines: a header, then each group followed by its rollouts, and a last line that marks the file as complete."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from penstock.codec import from_json, to_json
from penstock.errors import ConfigError
from penstock.pool.export.histories import GroupHistory, escape, unescape
from penstock.records import Group, Rollout
from penstock.system.files import creating

FORMAT = 1


@dataclass(slots=True)
class JsonlSink:
    out: BinaryIO
    groups: int = 0
    rollouts: int = 0

    def write(self, history: GroupHistory) -> None:
        _write(self.out, {"group": _fragment(replace(history.group, rollouts=())), "trained": history.trained})
        for rollout in history.rollouts:
            _write(self.out, {"rollout": _fragment(replace(rollout, message=escape(rollout.message)))})
        self.groups += 1
        self.rollouts += len(history.rollouts)


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
    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    groups: int = 0
    complete: bool = False

    def read_line(self, number: int, line: bytes) -> Iterator[GroupHistory]:
        """Read one line, and yield the group that it ends."""
        try:
            fields: dict[str, Any] = orjson.loads(line)
            if "rollout" in fields and self.group is not None:
                rollout = from_json(Rollout, orjson.dumps(fields["rollout"]))
                self.rollouts.append(replace(rollout, message=unescape(rollout.message)))
                return
            head = None if "whole" in fields else _GroupLine(from_json(Group, orjson.dumps(fields["group"])), fields["trained"])
        except (ValueError, LookupError, TypeError, AttributeError) as cause:
            raise ConfigError(f"{self.path}: line {number} cannot be read ({cause}); export again") from cause
        if self.group is not None:
            self.groups += 1
            yield GroupHistory(group=self.group.group, rollouts=tuple(self.rollouts), trained=self.group.trained)
        self.group, self.rollouts, self.complete = head, [], head is None


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
