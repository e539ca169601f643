"""What a process sends to the one that writes for it arrives as it was, however its bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PoolConflict, PoolError, PoolFailed
from penstock.pool.sql.writes import APPEND, END, encode_append, encode_end
from penstock.pool.writer import PendingWrite
from penstock.pool.writer_protocol import RequestDecoder, decode_answers, encode_answers, encode_request
from penstock.records import End, Grade, Node, Sampling, Step

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)


@st.composite
def appends(draw: st.DrawFn):
    rollout, ids, number = draw(TEXT), draw(IDS), draw(st.integers(0, 1000))
    floats = tuple(-0.5 * n for n in range(len(ids)))
    step = Step(
        rollout_id=rollout,
        index=draw(st.integers(0, 1000)),
        node=number,
        transcript="main",
        completion_ids=ids,
        logprobs=floats,
        full_logprobs=draw(st.sampled_from([None, floats])),
        versions=ids,
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": draw(TEXT)},
        chain="s",
    )
    parent, reason = draw(st.none() | st.integers(0, 9)), draw(st.none() | TEXT)
    node = Node(rollout_id=rollout, id=number, parent=parent, token_ids=draw(IDS), chain="n", messages=(), reason=reason)
    return APPEND, encode_append(step, draw(st.sampled_from([None, node])))


@st.composite
def ends(draw: st.DrawFn):
    rollout, message = draw(TEXT), draw(st.text(max_size=20))
    given = [Grade(rollout_id=rollout, reward=draw(st.floats(-9, 9)), source=draw(TEXT)) for _ in range(draw(st.integers(0, 3)))]
    return END, encode_end(rollout, draw(st.sampled_from(End)), message, given)


@given(st.lists(appends() | ends(), max_size=4), st.integers(1, 40))
def test_requests_arrive_as_they_were_sent_however_they_are_cut(sent, size):
    stream = b"".join(encode_request(number, *each) for number, each in enumerate(sent))
    decoder = RequestDecoder()
    read = [request for at in range(0, len(stream), size) for request in decoder.feed(stream[at : at + size])]
    assert read == [(number, *each) for number, each in enumerate(sent)]


@pytest.mark.parametrize("name", ["a lone \ud800 surrogate"])
def test_a_value_that_no_pool_could_hold_is_refused_by_its_sender(name):
    with pytest.raises(PoolError, match="cannot be stored"):
        encode_request(1, END, encode_end(name, End.COMPLETED, "", []))


def test_answers_keep_results_and_the_kinds_of_errors():
    def write(result=None, error=None):
        return PendingWrite(result=result, error=error)

    errors = [PoolConflict("differs"), PoolFailed("full"), PoolError("late"), ZeroDivisionError("a mistake of ours")]
    line = encode_answers([(7, write(result=True)), *((8 + n, write(error=error)) for n, error in enumerate(errors))])
    read = [(number, result, type(error), str(error or "")) for number, result, error in decode_answers(line)]
    assert read == [
        (7, True, type(None), ""),
        (8, None, PoolConflict, "differs"),
        (9, None, PoolFailed, "full"),
        (10, None, PoolError, "late"),
        (11, None, PoolFailed, "a mistake of ours"),
    ]
