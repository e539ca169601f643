"""Records to bytes and back: everything that is written is read back the same, or refused."""

import math
import struct
from dataclasses import is_dataclass
from functools import cache
from hashlib import blake2b
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import records
from penstock.codec import (
    context_digest,
    extend_ids_hash,
    from_json,
    pack_floats,
    pack_ints,
    pieces,
    to_json,
    unpack_floats,
    unpack_ints,
)
from penstock.records import Grade, Message, Task

names = st.text(st.characters(codec="utf-8"), max_size=8)
reals = st.floats(allow_nan=False, allow_infinity=False)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | reals | names
foreign = st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2), max_leaves=5)
RECORDS = [kind for kind in vars(records).values() if isinstance(kind, type) and is_dataclass(kind)]


@cache
def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that a field with this annotation may hold and JSON can."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return st.one_of([any_of(one) for one in inner])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        if inner[-1] is not Ellipsis:
            return st.tuples(*map(any_of, inner))
        return st.lists(any_of(inner[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(names, foreign, max_size=2)
    if is_dataclass(hint) and isinstance(hint, type):
        return st.builds(hint, **{name: any_of(field) for name, field in get_type_hints(hint).items()})
    simple = {int: st.integers(-(2**63), 2**63 - 1), float: reals, str: names}
    return simple[hint] if hint in simple else st.from_type(hint)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(choice=st.data())
def test_a_record_comes_back_from_json_the_same(kind: type[Any], choice: st.DataObject) -> None:
    written = choice.draw(any_of(kind))
    read = from_json(kind, to_json(written))
    assert read == written
    assert repr(read) == repr(written)


def test_whole_numbers_become_the_floats_that_the_field_says() -> None:
    grade = from_json(Grade, to_json(Grade(rollout_id="r", reward=1, source="g")))
    assert isinstance(grade.reward, float)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "content",
    [
        math.nan,
        math.inf,
        {"a": [{"b": -math.inf}]},
        "\ud800",
        {"\udc00": 1},
        {1: 2},
        2**64,
        -(2**63) - 1,
        b"x",
        {1, 2},
        nested(3000),
    ],
)
def test_what_json_would_change_or_lose_is_refused(content: Any) -> None:
    message: Message = {"role": "user", "content": content}
    with pytest.raises(ValueError):
        to_json(Task(id="t", prompt=(message,)))


@pytest.mark.parametrize("bad", [b"", b"{", b"[]", b'{"id": "t"}', b'{"id": "t", "prompt": [], "extra": 1}'])
def test_bytes_that_are_no_record_are_refused(bad: bytes) -> None:
    with pytest.raises(ValueError):
        from_json(Task, bad)


@given(values=st.lists(st.integers(-(2**31), 2**31 - 1)).map(tuple))
def test_ints_come_back_from_bytes(values: tuple[int, ...]) -> None:
    assert unpack_ints(pack_ints(values)) == values


@given(values=st.lists(st.floats(width=32)).map(tuple))
def test_single_precision_comes_back_bit_for_bit(values: tuple[float, ...]) -> None:
    packed = pack_floats(values)
    assert packed == struct.pack(f"<{len(values)}f", *values)
    assert pack_floats(unpack_floats(packed)) == packed


def test_columns_are_little_endian() -> None:
    assert pack_ints((1, -2)) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert unpack_floats(b"\0\0\x80\xbf") == (-1.0,)


@pytest.mark.parametrize("values", [(2**31,), (-(2**31) - 1,), (1.5,), ("1",), (None,)])
def test_what_is_no_token_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="column"):
        pack_ints(values)


def test_a_torn_column_is_refused() -> None:
    with pytest.raises(ValueError, match="column"):
        unpack_ints(b"\0\0\0\0\0")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(0, 20))
def test_context_has_one_digest_in_many_parts_it_is_hashed(ids: list[int], cut: int) -> None:
    before = extend_ids_hash(None, ids[:cut])
    assert extend_ids_hash(before, ids[cut:]).hexdigest() == context_digest(ids)
    assert before.hexdigest() == context_digest(ids[:cut])


def test_the_digest_of_a_context_never_changes() -> None:
    assert context_digest([1, 2, 3]) == "b30a3c159d7e8193559a42a84f1fcae1"


@pytest.mark.parametrize("other", [[], [1], [1, 2], [1, 2, 4], [2, 1, 3], [1, 2, 3, 0], [0, 1, 2, 3]])
def test_other_ids_have_another_digest(other: list[int]) -> None:
    assert context_digest(other) != context_digest([1, 2, 3])


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 5000, 64 * 1024, 64 * 1024 + 1])
def test_pieces_are_the_whole_in_order(size: int) -> None:
    blob = bytes(range(256)) * 257
    assert b"".join(pieces(blob[:size], 2047)) == blob[:size]
    assert context_digest(range(size)) == blake2b(struct.pack(f"<{size}i", *range(size)), digest_size=16).hexdigest()
