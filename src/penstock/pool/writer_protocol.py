"""What goes between the processes of a pool and the one that writes for them: plain values as JSON, rows as the bytes they are."""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from penstock.errors import PoolConflict, PoolError, PoolFailed
from penstock.pool.rows import COLUMNS, Ending, Row
from penstock.pool.rules import Span
from penstock.pool.sql.writes import APPEND, END, Added, Append, Finish, GradeRow
from penstock.pool.sqlite_file import UNFIT
from penstock.pool.writer import Bulk, Job
from penstock.records import Node, Step

Blobs = Sequence[bytes | None]

_SIZES = struct.Struct("<II")
"""Of the head, which is JSON, and of the blobs that follow it."""
ERRORS = {kind.__name__: kind for kind in (PoolError, PoolConflict, PoolFailed)}
"""What may come of a write."""


class WriteRequest(NamedTuple):
    """A value to be written."""

    number: int
    """Of the sender's; the answer names it."""
    bulk: Bulk
    value: Any


class _Form(NamedTuple):
    """How values of a kind are sent: what is JSON, and the blobs beside it."""

    bulk: Bulk
    split: Callable[[Any], tuple[Any, Blobs]]
    join: Callable[[Any, Blobs], Any]


def encode_request(number: int, bulk: Bulk, value: Any) -> bytes:
    """As `Letters` reads it; PoolError where the pool could not hold the value."""
    facts, blobs = _FORMS[bulk.name].split(value)
    try:
        head = orjson.dumps((number, bulk.name, facts, [-1 if blob is None else len(blob) for blob in blobs]))
    except TypeError as cause:
        raise PoolError(f"{UNFIT} ({cause})") from cause
    body = b"".join([blob for blob in blobs if blob])
    return b"".join((_SIZES.pack(len(head), len(body)), head, body))


class WriteRequests:
    """Those of one sender, as their bytes come in."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def read(self, received: bytes) -> Iterator[WriteRequest]:
        """All that are complete now."""
        self._rest += received
        at, end = 0, len(self._rest)
        while end - at >= _SIZES.size:
            head, body = _SIZES.unpack_from(self._rest, at)
            start = at + _SIZES.size
            if end < start + head + body:
                break
            yield _read(bytes(self._rest[start : start + head]), bytes(self._rest[start + head : start + head + body]))
            at = start + head + body
        del self._rest[:at]


def write_answers(answers: Sequence[tuple[int, Job]]) -> bytes:
    """One line that says what came of these."""
    lines = [
        (number, job.result) if job.error is None else (number, None, type(job.error).__name__, str(job.error))
        for number, job in answers
    ]
    return orjson.dumps(lines) + b"\n"


def read_answers(line: bytes) -> Iterator[tuple[int, Any, Exception | None]]:
    """Number, result and error of each."""
    for number, result, *error in orjson.loads(line):
        yield number, result, ERRORS.get(error[0], PoolFailed)(error[1]) if error else None


def _read(head: bytes, body: bytes) -> WriteRequest:
    number, name, facts, sizes = orjson.loads(head)
    blobs: list[bytes | None] = []
    at = 0
    for size in sizes:
        blobs.append(None if size < 0 else body[at : at + size])
        at += max(size, 0)
    form = _FORMS[name]
    return WriteRequest(number, form.bulk, form.join(facts, blobs))


_STEP, _NODE = 1 + len(COLUMNS[Step]), 1 + len(COLUMNS[Node])
"""Blobs of a row: the record, and its columns."""


def _split_append(given: Append) -> tuple[Any, Blobs]:
    row, added = given.row, given.added
    node = added and (added.parent, added.reason, added.tokens, added.row.crc)
    facts = (given.rollout_id, given.step, given.node, node, given.sampled, *given.versions, row.crc)
    return facts, (row.record, *row.columns, *((added.row.record, *added.row.columns) if added else ()))


def _join_append(facts: Any, blobs: Blobs) -> Append:
    rollout_id, step, node, added, sampled, oldest, newest, crc = facts
    if added is not None:
        parent, reason, tokens, node_crc = added
        added = Added(parent, reason, tokens, _row(blobs[_STEP:], node_crc))
    return Append(rollout_id, step, node, added, sampled, Span(oldest, newest), _row(blobs[:_STEP], crc))


def _split_end(given: Finish) -> tuple[Any, Blobs]:
    facts = (given.rollout_id, given.ending.end, [(each.row.crc, each.name) for each in given.grades])
    return facts, (given.ending.message, *(blob for each in given.grades for blob in (each.key[1], each.row.record)))


def _join_end(facts: Any, blobs: Blobs) -> Finish:
    (rollout_id, end, grades), (message, *rest) = facts, (blob or b"" for blob in blobs)
    rows = [
        GradeRow((rollout_id, key), Row(record, (), crc), name)
        for key, record, (crc, name) in zip(rest[::2], rest[1::2], grades, strict=True)
    ]
    return Finish(rollout_id, Ending(end, message), rows)


def _row(blobs: Blobs, crc: int) -> Row:
    record, *columns = blobs
    return Row(record or b"", tuple(columns), crc)


_FORMS = {form.bulk.name: form for form in (_Form(APPEND, _split_append, _join_append), _Form(END, _split_end, _join_end))}
