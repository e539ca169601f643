"""Server-sent events, cut anywhere."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.sse import SseDecoder

STREAM = (
    b'data: {"a": 1}\n\n: a comment\n\nevent: ping\nid: 7\n\n'
    b"data:one\r\ndata: two\r\n\r\ndata: \xc3\xa9\n\n\n\ndata: [DONE]\n\ndata: half"
)
PAYLOADS = [b'{"a": 1}', b"one\ntwo", b"\xc3\xa9", b"[DONE]"]


def test_events_of_a_stream():
    assert SseDecoder().feed(STREAM) == PAYLOADS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_where_the_stream_is_cut_makes_no_difference(cuts: list[int]):
    events, places = SseDecoder(), [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(places)]
    assert [payload for piece in pieces for payload in events.feed(piece)] == PAYLOADS


def test_byte_by_byte():
    events = SseDecoder()
    assert [payload for byte in STREAM for payload in events.feed(bytes([byte]))] == PAYLOADS


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 200, b"data: x\n" * 30, b"x" * 200])
def test_an_event_without_end_is_refused(piece: bytes):
    with pytest.raises(ValueError, match="100"):
        SseDecoder(limit=100).feed(piece)


def test_many_events_are_not_one_long_one():
    events = SseDecoder(limit=100)
    assert [events.feed(b"data: " + b"x" * 50 + b"\n\n") for _ in range(10)] == [[b"x" * 50]] * 10
