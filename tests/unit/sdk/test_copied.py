from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sdk.samples import fast_copy

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def containers(value):
    """Every list and dictionary inside."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


@given(JSON)
def test_a_copy_is_equal_and_shares_nothing_that_can_change(value):
    copy = fast_copy(value)
    assert copy == value
    assert not {id(each) for each in containers(copy)} & {id(each) for each in containers(value)}


class Odd(dict):
    """Not what JSON gives."""


@pytest.mark.parametrize("value", [Odd(a=[1]), ({"a": [1]},), {"path": Path("x")}, {"bytes": bytearray(b"x")}, {1, 2}])
def test_what_json_has_no_word_for_is_copied_too(value):
    copy = fast_copy(value)
    assert copy == value
    assert type(copy) is type(value)
    assert copy is not value


def test_what_an_odd_value_holds_is_copied():
    given = {"odd": Odd(inner=[1])}
    fast_copy(given)["odd"]["inner"].append(2)
    assert given == {"odd": Odd(inner=[1])}
