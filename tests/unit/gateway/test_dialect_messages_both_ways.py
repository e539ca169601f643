import json
from itertools import pairwise

import orjson
from hypothesis import assume, example, given
from hypothesis import strategies as st
from messages_cases import DIALECT, USER, Before, accumulated, block, parse, step, streamed, text, whole

from penstock.chat.templates import message_digest
from penstock.errors import RequestError
from penstock.gateway.dialects.messages import ToolInputStream
from penstock.gateway.reply import CallDelta, deltas_of
from penstock.records import Sampling

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def replies(draw):
    """Assistant messages as the gateway records them."""
    message = {"role": "assistant", "content": draw(st.text())}
    if thought := draw(st.text()):
        message["reasoning_content"] = thought
    inputs = draw(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=3))
    if inputs:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": f"call_{place}", "type": "function", "function": {"name": f"f{place}", "arguments": json.dumps(given)}}
            for place, given in enumerate(inputs)
        ]
    return message


def cut(draw, delta):
    """A delta in pieces, the same in sum."""
    said = delta.arguments if isinstance(delta, CallDelta) else delta.text
    ends = sorted({0, len(said), *draw(st.lists(st.integers(0, len(said)), max_size=4))})
    parts = [said[start:end] for start, end in pairwise(ends)] or [""]
    if not isinstance(delta, CallDelta):
        return [type(delta)(part) for part in parts if part]
    return [delta._replace(arguments=part, begins=place == 0) for place, part in enumerate(parts)]


@given(replies(), st.data())
def test_however_reply_is_cut_stream_adds_up_to_whole_answer(message, source):
    made = step(message, sampled="ab\0")
    deltas = [part for delta in deltas_of(message) for part in cut(source.draw, delta)]
    assert accumulated(streamed(deltas, made)) == whole(made)


@given(st.lists(replies(), min_size=1, max_size=3), st.booleans())
def test_a_conversation_sent_back_as_received_is_the_recorded_one(messages, strips):
    turns, recorded = [USER], []
    for message in messages:
        received = whole(step(message))["content"]
        if strips:
            received = [each | {"text": each["text"].strip()} if each["type"] == "text" else each for each in received]
        results = [block("tool_result", tool_use_id=call["id"], content="4") for call in message.get("tool_calls", ())]
        turns += [{"role": "assistant", "content": received}, {"role": "user", "content": [*results, text("go on")]}]
        recorded.append(message_digest(message))
    parsed = parse(*json.loads(json.dumps(turns))).messages
    assert [message_digest(message) for message in parsed if message["role"] == "assistant"] == recorded
    assert [message["role"] for message in parsed].count("tool") == sum(len(m.get("tool_calls", ())) for m in messages)


@st.composite
def almost_json(draw):
    """An object's text with a few characters lost, added or replaced."""
    text = json.dumps(draw(st.dictionaries(st.text(), JSON, max_size=3)), ensure_ascii=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", *'{}[]",:\\u0dx 1-.'])) + text[at + draw(st.integers(0, 1)) :]
    return text


def given_out(text, ends, **how):
    """What a client gets of arguments that come in parts, and of each part."""
    checked = ToolInputStream()
    parts = [checked.push(text[start:end]) for start, end in pairwise([0, *ends, len(text)])]
    return "".join(parts) + checked.finish(**how)


@given(almost_json(), st.data())
@example("", None)
@example('{"a": 1e999}', None)
@example('{"a": [{"b": [1, {"c"', None)
@example('{"a": "\\ud83d\\ude00\\ud800"}', None)
def test_any_arguments_become_an_object_and_come_back(written, source):
    ends = sorted(source.draw(st.lists(st.integers(0, len(written)), max_size=5))) if source else []
    sent = given_out(written, ends, cut=False)
    assert sent == given_out(written, [], cut=False)
    assume(not written.startswith(sent) or sent == written)  # the parser ends arguments where their object ends
    received = json.loads(sent or "{}")  # where nothing is sent, clients keep the empty object that the block began with
    assert isinstance(received, dict)
    back = parse(USER, {"role": "assistant", "content": [block("tool_use", id="a", name="f", input=received)]}, USER).messages[1]
    recorded = {"function": {"name": "f", "arguments": written}}
    assert message_digest(back) == message_digest({"role": "assistant", "tool_calls": [recorded]})


@given(st.dictionaries(st.text(), JSON, min_size=1, max_size=3), st.data())
def test_json_arguments_are_sent_unchanged(members, source):
    written = json.dumps(members)
    end = source.draw(st.integers(0, len(written)))
    assert given_out(written, [end], cut=False) == written
    sent = given_out(written[:end], [], cut=True)
    assert written.startswith(sent)
    assert len(written[:end]) - len(sent) < 30  # a number, a word or an escape at the end


NAMES = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "thinking",
        "tool_use",
        "tool_result",
        "input",
        "name",
        "id",
        "tool_use_id",
        "user",
        "assistant",
        "__unparsedToolInput",
        "raw",
        "len",
        "create",
        "continue",
        "previous_message_id",
        "any",
        "tool",
        "input_schema",
        "custom",
    ]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "thread",
        "stop_sequences",
        "max_tokens",
        "top_k",
        "stream",
    ]
)


@given(st.dictionaries(FIELDS, ODD, max_size=4))
def test_whatever_a_body_holds_it_is_read_or_refused(body):
    try:
        DIALECT.parse({"messages": [USER]} | body, Sampling(), Before())
    except RequestError as error:
        assert orjson.dumps(DIALECT.error(error))
