"""Messages between the processes of a pool and its writer process.

A request is a JSON head followed by raw blobs, the encoded rows. Answers are lines of JSON.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from penstock.errors import PoolConflict, PoolError, PoolFailed
from penstock.pool.rows import COLUMNS, RecordRow, StoredEnd
from penstock.pool.rules import VersionRange
from penstock.pool.sql.sqlite import UNSTORABLE
from penstock.pool.sql.writes import APPEND, END, AppendRequest, EndRequest, GradeRow, NewNode
from penstock.pool.writer import BatchOperation, PendingWrite
from penstock.records import Step

Blobs = Sequence[bytes | None]

_SIZES = struct.Struct("<II")
"""Sizes of the JSON head and of the blobs after it."""
ERRORS = {"PoolError": PoolError, "PoolConflict": PoolConflict, "PoolFailed": PoolFailed}
"""Errors that an answer may name."""


class WriteRequest(NamedTuple):
    number: int
    """Chosen by the client; the answer repeats it."""
    operation: BatchOperation
    value: Any


class _Encoding(NamedTuple):
    """How the values of an operation are split into JSON and blobs."""

    operation: BatchOperation
    split: Callable[[Any], tuple[Any, Blobs]]
    join: Callable[[Any, Blobs], Any]


def encode_request(number: int, operation: BatchOperation, value: Any) -> bytes:
    """Encode a request for `RequestDecoder`; PoolError if the pool could not store the value."""
    fields, blobs = _ENCODINGS[operation.name].split(value)
    try:
        head = orjson.dumps((number, operation.name, fields, [-1 if blob is None else len(blob) for blob in blobs]))
    except TypeError as cause:
        raise PoolError(f"{UNSTORABLE} ({cause})") from cause
    body = b"".join([blob for blob in blobs if blob])
    return b"".join((_SIZES.pack(len(head), len(body)), head, body))


class RequestDecoder:
    """Decodes the requests of one client from a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[WriteRequest]:
        """Yield the requests that are complete now."""
        self._buffer += received
        at, end = 0, len(self._buffer)
        while end - at >= _SIZES.size:
            head, body = _SIZES.unpack_from(self._buffer, at)
            start = at + _SIZES.size
            if end < start + head + body:
                break
            yield _decode_request(
                bytes(self._buffer[start : start + head]), bytes(self._buffer[start + head : start + head + body])
            )
            at = start + head + body
        del self._buffer[:at]


def encode_answers(answers: Sequence[tuple[int, PendingWrite]]) -> bytes:
    """Encode the outcomes of numbered writes as one line."""
    lines = [
        (number, write.result) if write.error is None else (number, None, type(write.error).__name__, str(write.error))
        for number, write in answers
    ]
    return orjson.dumps(lines) + b"\n"


def decode_answers(line: bytes) -> Iterator[tuple[int, Any, Exception | None]]:
    """Yield the number, result and error of each write."""
    for number, result, *error in orjson.loads(line):
        yield number, result, ERRORS.get(error[0], PoolFailed)(error[1]) if error else None


def _decode_request(head: bytes, body: bytes) -> WriteRequest:
    number, name, fields, sizes = orjson.loads(head)
    blobs: list[bytes | None] = []
    at = 0
    for size in sizes:
        blobs.append(None if size < 0 else body[at : at + size])
        at += max(size, 0)
    encoding = _ENCODINGS[name]
    return WriteRequest(number, encoding.operation, encoding.join(fields, blobs))


_STEP = 1 + len(COLUMNS[Step])
"""Number of blobs of a step: the record and its array columns. Those of its node follow."""


def _split_append(request: AppendRequest) -> tuple[Any, Blobs]:
    row, node = request.row, request.new_node
    node_fields = node and (node.parent, node.reason, node.tokens, node.row.crc)
    fields = (request.rollout_id, request.step, request.node, node_fields, request.sampled, *request.versions, row.crc)
    return fields, (row.record, *row.columns, *((node.row.record, *node.row.columns) if node else ()))


def _join_append(fields: Any, blobs: Blobs) -> AppendRequest:
    rollout_id, step, node, node_fields, sampled, oldest, newest, crc = fields
    new_node = None
    if node_fields is not None:
        parent, reason, tokens, node_crc = node_fields
        new_node = NewNode(parent, reason, tokens, _row(blobs[_STEP:], node_crc))
    return AppendRequest(rollout_id, step, node, new_node, sampled, VersionRange(oldest, newest), _row(blobs[:_STEP], crc))


def _split_end(request: EndRequest) -> tuple[Any, Blobs]:
    grades = [(grade.row.crc, grade.name) for grade in request.grades]
    fields = (request.rollout_id, request.end.end, grades, request.only_grades)
    return fields, (request.end.message, *(blob for grade in request.grades for blob in (grade.key[1], grade.row.record)))


def _join_end(fields: Any, blobs: Blobs) -> EndRequest:
    (rollout_id, end, grades, only_grades), (message, *rest) = fields, (blob or b"" for blob in blobs)
    rows = [
        GradeRow((rollout_id, key), RecordRow(record, (), crc), name)
        for key, record, (crc, name) in zip(rest[::2], rest[1::2], grades, strict=True)
    ]
    return EndRequest(rollout_id, StoredEnd(end, message), rows, only_grades)


def _row(blobs: Blobs, crc: int) -> RecordRow:
    record, *columns = blobs
    return RecordRow(record or b"", tuple(columns), crc)


_ENCODINGS = {
    APPEND.name: _Encoding(APPEND, _split_append, _join_append),
    END.name: _Encoding(END, _split_end, _join_end),
}
