"""A pool as lines of JSON: one for the file, one per group followed by one per rollout, and one that says it is whole."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from penstock.codec import from_json, to_json
from penstock.errors import ConfigError
from penstock.pool.export.transfer import escape, unescape
from penstock.pool.paging import Whole
from penstock.records import Attempt, Group
from penstock.system.files import creating

FORMAT = 1


@dataclass(slots=True)
class JsonlSink:
    """Writes groups to an open file."""

    out: BinaryIO
    groups: int = 0
    rollouts: int = 0

    def write(self, whole: Whole) -> None:
        _write(self.out, {"group": _fragment(replace(whole.group, attempts=())), "trained": whole.trained})
        for attempt in whole.attempts:
            _write(self.out, {"rollout": _fragment(replace(attempt, message=escape(attempt.message)))})
        self.groups += 1
        self.rollouts += len(whole.attempts)


@contextmanager
def open_export(path: Path, channels: Sequence[str]) -> Generator[JsonlSink]:
    with creating(path) as part, part.open("wb") as out:
        _write(out, {"penstock_pool": FORMAT, "channels": list(channels)})
        sink = JsonlSink(out)
        yield sink
        _write(out, {"whole": {"groups": sink.groups, "rollouts": sink.rollouts}})
        out.flush()


def read_export(path: Path) -> Iterator[Whole]:
    with path.open("rb") as lines:
        head = _first(path, lines)
    if head.get("penstock_pool") != FORMAT:
        raise ConfigError(f"{path}: written by a newer penstock (format {head.get('penstock_pool')!r}); upgrade penstock")
    return _read(path)


def _read(path: Path) -> Iterator[Whole]:
    reader = _Reader(path)
    with path.open("rb") as lines:
        lines.readline()
        for number, line in enumerate(lines, 2):
            yield from reader.take(number, line)
    if not reader.whole:
        raise ConfigError(f"{path}: cut short after {reader.groups} groups, which are imported; take a whole copy for the rest")


@dataclass(slots=True)
class _Reader:
    path: Path
    group: "_Head | None" = None
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    groups: int = 0
    whole: bool = False

    def take(self, number: int, line: bytes) -> Iterator[Whole]:
        """Read one line; the group that it ends."""
        try:
            fields: dict[str, Any] = orjson.loads(line)
            if "rollout" in fields and self.group is not None:
                attempt = from_json(Attempt, orjson.dumps(fields["rollout"]))
                self.attempts.append(replace(attempt, message=unescape(attempt.message)))
                return
            head = None if "whole" in fields else _Head(from_json(Group, orjson.dumps(fields["group"])), fields["trained"])
        except (ValueError, LookupError, TypeError, AttributeError) as cause:
            raise ConfigError(f"{self.path}: line {number} cannot be read ({cause}); export again") from cause
        if self.group is not None:
            self.groups += 1
            yield Whole(group=self.group.group, attempts=tuple(self.attempts), trained=self.group.trained)
        self.group, self.attempts, self.whole = head, [], head is None


class _Head(NamedTuple):
    group: Group
    trained: int | None


def _first(path: Path, lines: BinaryIO) -> dict[str, Any]:
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
