"""Records to bytes and back: the only place that knows how a record is written.

Plain fields go as JSON; long token columns as raw little-endian arrays, which a pool keeps in separate columns.
"""

import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import orjson

T = TypeVar("T")


def to_json(record: Any) -> bytes:
    """Encode a record, or a tuple or list of them; ValueError for values that JSON would change: nan, lone surrogates, …"""
    try:
        _check(record)
        return exact_copy(orjson.dumps(record, default=_bytes_text))
    except (TypeError, RecursionError) as cause:
        raise ValueError(f"not JSON: {cause}") from cause


def _bytes_text(value: Any) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def exact_copy(encoded: bytes) -> bytes:
    """Copy what orjson wrote into memory of its size: its results keep the buffer they were written into, up to 60 times it."""
    return bytes(memoryview(encoded))


def from_json(kind: type[T], text: bytes | str, **given: Any) -> T:
    """Decode a record of type `kind`; ValueError if `text` is not one. Fields that are `given` are taken as they are."""
    value = orjson.loads(text)
    try:
        if given:
            return kind(**{**_built_fields(kind, value), **given})
        return value if (build := _builder(kind)) is None else build(value)
    except (AttributeError, KeyError, TypeError) as cause:
        raise ValueError(f"not a {kind.__name__}: {type(cause).__name__}: {cause}") from cause


def pack_ints(values: Sequence[int]) -> bytes:
    """Pack token ids or versions as little-endian int32; ValueError for other values."""
    return _pack("i", values)


def unpack_ints(blob: bytes) -> tuple[int, ...]:
    return _unpack("i", blob)


def extend_ids_hash(previous: blake2b | None, ids: Sequence[int]) -> blake2b:
    """Return the hash of the ids of `previous` followed by `ids`. `previous` is not changed, so that paths may fork.

    `hexdigest()` of it is what `Step.context_digest` holds, whoever computes it and in however many parts.
    """
    grown = blake2b(digest_size=16) if previous is None else previous.copy()
    for piece in pieces(pack_ints(ids), UNLOCKED):
        grown.update(piece)
    return grown


UNLOCKED = 2047
"""hashlib keeps the interpreter's lock for up to this many bytes."""
LONG = 64 * 1024


def pieces(blob: bytes | memoryview, size: int) -> Iterable[bytes | memoryview]:
    """Split `blob` into parts of at most `size` bytes, unless it is long.

    Checksums and hashes release the interpreter's lock for larger inputs. Short ones take it back before a waiting thread has woken
    up, and that thread starts its wait again: a thread that computes many of them in a row starves the others for a hundred times
    the switch interval.
    """
    if len(blob) <= size or len(blob) > LONG:
        return (blob,)
    view = memoryview(blob)
    return [view[first : first + size] for first in range(0, len(blob), size)]


def context_digest(ids: Sequence[int]) -> str:
    """Returns the value of `Step.context_digest` for these token ids."""
    return extend_ids_hash(None, ids).hexdigest()


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack log-probabilities as little-endian float32; engines compute them in that precision or less."""
    return _pack("f", values)


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    return _unpack("f", blob)


def _pack(code: str, values: Sequence[Any]) -> bytes:
    try:
        return _column(code, len(values)).pack(*values)
    except (struct.error, OverflowError) as cause:
        raise ValueError(f"not a column of numbers: {cause}") from cause


def _unpack(code: str, blob: bytes) -> tuple[Any, ...]:
    try:
        return _column(code, len(blob) // 4).unpack(blob)
    except struct.error as cause:
        raise ValueError(f"not a column of numbers: {cause}") from cause


@lru_cache(maxsize=4096)
def _column(code: str, length: int) -> struct.Struct:
    return struct.Struct(f"<{length}{code}")


def _check(value: Any) -> None:
    """Refuse nan and infinity, which orjson would silently write as null, and bytes but in a record's own fields."""
    kind: Any = value.__class__
    if kind is float:
        if value - value != 0.0:
            raise ValueError(f"{value} cannot be written as JSON")
    elif kind is not bytes and kind not in _SAFE:
        for item in _inside(kind, value):
            if item.__class__ not in _SAFE:
                if item.__class__ is bytes and (kind is dict or kind is list):
                    raise ValueError("bytes cannot be written as JSON")
                _check(item)


_SAFE = frozenset({str, int, bool, NoneType})


def _inside(kind: Any, value: Any) -> Iterable[Any]:
    if kind is dict:
        return value.values()
    if kind is tuple or kind is list:
        return value
    if is_dataclass(kind):
        return [getattr(value, name) for name in field_names(kind)]
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value).values()
    if isinstance(value, (tuple, list)):
        return cast("Iterable[Any]", value)
    return [float(value)] if isinstance(value, float) else ()


@cache
def field_names(kind: Any) -> tuple[str, ...]:
    """Return the fields of a record type, in the order in which they are written."""
    return tuple(field.name for field in fields(kind))


Build = Callable[[Any], Any]


@cache
def _builder(kind: Any) -> Build | None:
    """The function that makes a `kind` of a value from JSON; None where that is the value itself."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = _builder(next(a for a in args if a is not NoneType))
        return inner and (lambda value: None if value is None else inner(value))
    if origin is tuple:
        return _tuple_builder(args)
    if is_dataclass(kind) and isinstance(kind, type):
        return lambda value: kind(**_built_fields(kind, value))
    if kind is bytes:
        return lambda value: b64decode(value, validate=True)
    if isinstance(kind, type) and origin is None and kind not in (dict, object):
        return lambda value: value if isinstance(value, kind) else kind(value)  # an enum, or an int where a float is meant
    return None


def _tuple_builder(args: tuple[Any, ...]) -> Build:
    if args[-1] is not Ellipsis:
        inner = [_builder(a) or _same for a in args]
        return lambda value: tuple([build(v) for build, v in zip(inner, value, strict=True)])
    each = _builder(args[0])
    return lambda value: tuple(value if each is None else map(each, value))


def _same(value: Any) -> Any:
    return value


_OLD_NAMES = {
    "Node": {"chain": "messages_digest"},
    "Step": {"chain": "messages_digest", "context": "context_digest"},
    "Rollout": {"rollout": "ref"},
    "Group": {"attempts": "rollouts"},
}
"""Per record: field names in older files, and what they are called now."""


def current_names(kind: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the stored fields of a `kind` under their current names."""
    old = _OLD_NAMES.get(kind.__name__)
    return fields if old is None else {old.get(name, name): item for name, item in fields.items()}


def _built_fields(kind: type[Any], value: dict[str, Any]) -> dict[str, Any]:
    builders = _field_builders(kind)
    current = current_names(kind, value)
    return {name: item if (build := builders[name]) is None else build(item) for name, item in current.items()}


@cache
def _field_builders(kind: type[Any]) -> dict[str, Build | None]:
    return {name: _builder(hint) for name, hint in get_type_hints(kind).items()}
