"""Records as rows of typed columns, whatever fields they have: plain values and token lists as such, all else as JSON."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import orjson

from penstock.codec import from_json, to_json

T = TypeVar("T")

Kind = Literal["text", "int", "float", "bool", "ints", "floats", "json"]
_PLAIN: dict[Any, Kind] = {
    str: "text",
    int: "int",
    float: "float",
    bool: "bool",
    tuple[int, ...]: "ints",
    tuple[float, ...]: "floats",
}


class Column(NamedTuple):
    """One field of a record."""

    name: str
    kind: Kind


@cache
def columns(record: type[Any], without: tuple[str, ...] = ()) -> list[Column]:
    """The columns of a record's type, in the order of its fields."""
    return [Column(name, _kind(hint)) for name, hint in get_type_hints(record).items() if name not in without]


def to_row(record: Any, wanted: Sequence[Column]) -> dict[str, Any]:
    """The values of a record by column."""
    return {column.name: _cell(getattr(record, column.name), column.kind) for column in wanted}


def from_row(record: type[T], row: dict[str, Any], wanted: Sequence[Column], **fields: Any) -> T:
    """The record that `to_row` took apart; `fields` are those that have no column. ValueError where it is none."""
    lists = {column.name for column in wanted if column.kind in ("ints", "floats") and row[column.name] is not None}
    plain: dict[str, Any] = {name: [] for name in lists}
    for name, kind in wanted:
        if name not in lists:
            value = row[name]
            plain[name] = orjson.Fragment(value) if kind == "json" and value is not None else value
    built = from_json(record, orjson.dumps({**plain, **{name: orjson.Fragment(to_json(value)) for name, value in fields.items()}}))
    return replace(built, **{name: tuple(row[name]) for name in lists}) if lists else built  # type: ignore[type-var]


def _kind(hint: Any) -> Kind:
    given = [part for part in get_args(hint) if part is not NoneType] if NoneType in get_args(hint) else [hint]
    [plain] = given if len(given) == 1 else [object]
    if get_origin(plain) is Literal or (isinstance(plain, type) and issubclass(plain, StrEnum)):
        return "text"
    return _PLAIN.get(plain, "json")


def _cell(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind == "json":
        return to_json(value).decode()
    return str(value) if kind == "text" else value
