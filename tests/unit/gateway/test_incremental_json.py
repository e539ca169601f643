from hashlib import sha256
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.last_request import MAX_UNSTABLE, MIN_CACHED_BYTES, IncrementalBody

WORDS = "because the thing before it came, "
LONG_ONE = {"role": "system", "content": WORDS * (MIN_CACHED_BYTES // len(WORDS) + 1)}
WHO = b"rollout\0main\0"


def user(text):
    return {"role": "user", "content": text}


def body(*messages, key="messages", **others):
    return orjson.dumps({"model": "m", key: [LONG_ONE, *messages], **others})


def check(growing, text, who=WHO):
    """What is read of a body and the digest of it are those of the whole body."""
    assert growing.digest(who, text) == sha256(who + text).hexdigest()
    read = growing.read(text)
    assert read == orjson.loads(text)
    return read


def depth(value):
    levels = 0
    while isinstance(value, list):
        value, levels = (value or [None])[0], levels + 1
    return levels


def same(one, other):
    """How many entries of two lists are the very same objects."""
    return sum(a is b for a, b in zip(one["messages"], other["messages"], strict=False))


def test_what_a_body_repeats_is_not_read_again():
    growing = IncrementalBody()
    first = check(growing, body(user("1"), seed=1))
    second = check(growing, body(user("1"), user("2 ] , } é"), seed=2, tools=[{"a": ["]"]}]))
    third = check(growing, body(user("1"), user("2 ] , } é"), user("3"), stream=True))
    assert (same(first, second), same(second, third)) == (2, 3)
    assert (len(first["messages"]), len(second["messages"])) == (2, 3)


def test_the_same_body_has_the_same_digest_however_it_is_reached_and_another_caller_another():
    growing = IncrementalBody()
    check(growing, body(user("1")))
    again = [growing.digest(WHO, body(user("1"))), growing.digest(b"other", body(user("1"))), growing.digest(WHO, body(user("1")))]
    assert again[0] == again[2] != again[1] == sha256(b"other" + body(user("1"))).hexdigest()


def test_an_edited_history_is_read_from_the_beginning():
    growing = IncrementalBody()
    check(growing, body(user("1"), user("2")))
    check(growing, body(user("1"), user("other"), user("3")))
    check(growing, body(user("1")))


def test_marks_that_move_along_with_the_end_are_let_be():
    growing = IncrementalBody()
    said = [[*(user(str(n)) for n in range(size)), user(str(size)) | {"cache": True}] for size in range(10)]
    read = [check(growing, body(*messages)) for messages in said]
    assert [same(one, other) for one, other in pairwise(read)] == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_bodies_that_never_go_on_are_soon_only_read():
    growing = IncrementalBody()
    for n in range(MAX_UNSTABLE + 3):
        check(growing, orjson.dumps({"seed": n, "messages": [LONG_ONE, user("1")]}))
    read = [check(growing, body(user("1"))) for _ in range(2)]
    assert same(*read) == 0


def test_a_list_by_that_name_further_down_is_not_taken_for_the_objects_own():
    growing = IncrementalBody()
    for n in range(3):
        inner = {"messages": [LONG_ONE, *map(user, "ab"[:n])]}
        check(growing, orjson.dumps({"metadata": inner, "messages": [user(str(n))]}))
        check(growing, orjson.dumps([inner]))


def test_of_a_key_that_comes_twice_the_last_one_counts():
    growing = IncrementalBody()
    whole = body(user("1"))
    check(growing, whole)
    check(growing, whole[:-1] + b',"messages":[{"role":"user","content":"2"}]}')
    check(growing, whole[:-1] + b',"m\\u0065ssages":"text"}')
    check(growing, whole[:-1] + b',"messages":[]}')


@pytest.mark.parametrize("tail", [b"", b"]", b"]}x", b",]}", b' "x"]}', b',{"a":NaN}]}', b',{"a":"\xff"}]}', b"],}", b",1 2]}"])
def test_what_is_no_json_is_refused_in_the_same_words(tail):
    growing = IncrementalBody()
    known = body(user("1"))
    check(growing, known)
    with pytest.raises(orjson.JSONDecodeError) as plain:
        orjson.loads(known[:-2] + tail)
    with pytest.raises(orjson.JSONDecodeError) as told:
        growing.read(known[:-2] + tail)
    assert str(told.value) == str(plain.value)
    check(growing, body(user("1"), user("2")))


def test_a_number_that_goes_on_is_another_number():
    growing = IncrementalBody()
    for number in (b"1", b"12", b"12.5", b"12.5e3"):
        check(growing, body()[:-2] + b"," + number + b"]}")


def test_entries_nested_deeper_than_python_goes_are_read():
    growing = IncrementalBody()
    for count in (1, 2, 3):
        entries = growing.read(body()[:-2] + (b"," + b"[" * 1000 + b"]" * 1000) * count + b"]}")["messages"]
        assert [depth(entry) for entry in entries] == [0, *[1000] * count]
    check(growing, body(user("1")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
SPACE = st.sampled_from(("", " ", "\n", " \t\r\n"))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(JSON, max_size=3), SPACE, st.sampled_from(("messages", "input"))), max_size=6)
)
def test_any_row_of_bodies_is_read_as_each_alone(rows):
    growing, entries = IncrementalBody(), [LONG_ONE]
    for dropped, added, space, key in rows:
        entries = [*entries[: max(1, len(entries) - dropped)], *added]
        listed = f"{space},{space}".join(orjson.dumps(entry).decode() for entry in entries)
        check(growing, f'{{{space}"{key}"{space}:{space}[{space}{listed}{space}],"n":{dropped}}}'.encode())
