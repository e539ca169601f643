import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from openai_cases import (
    CUSTOM,
    FUNCTION,
    NAMESPACE,
    EarlierCalls,
    answer_to,
    deltas_in,
    events_in,
    message,
    parse,
    streamed,
    tokenizer,
)
from pydantic import TypeAdapter

from penstock.chat.parsers.base import Text
from penstock.chat.templates import message_digest
from penstock.errors import RequestError
from penstock.gateway.dialects.fields import FreeformReader, freeform_arguments, freeform_text
from penstock.gateway.dialects.responses import ResponsesDialect

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "6 times 7?"}]}
ASKED = {"role": "user", "content": "6 times 7?"}


def ask(past=None, **body):
    return parse(ResponsesDialect, past, **{"input": "6 times 7?"} | body)


def whole(call, reply, finish="stop"):
    return orjson.loads(ResponsesDialect(tokenizer()).json_body(answer_to(call, reply, finish)))


def test_text_is_one_user_message_and_instructions_come_first():
    call = ask(instructions="Be brief.")
    assert [(each["role"], each["content"]) for each in call.messages] == [("system", "Be brief."), ("user", "6 times 7?")]


def test_items_of_one_reply_are_one_assistant_message():
    items = [
        {"role": "developer", "content": "Be brief."},
        USER,
        {"type": "reasoning", "id": "rs_0", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I see.", "annotations": []}]},
        {"type": "function_call", "id": "fc_0", "call_id": "a", "name": "multiply", "arguments": '{"a": 6}', "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "close", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "42"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "closed"}]},
        {"type": "message", "role": "assistant", "content": "It is 42."},
    ]
    made = ask(input=items).messages
    assert [each["role"] for each in made] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    names = [call["function"]["name"] for call in made[2]["tool_calls"]]
    assert (made[2]["reasoning_content"], made[2]["content"], names) == ("Hm.", "I see.", ["multiply", "agents__close"])
    assert [(each["tool_call_id"], each["content"]) for each in made[3:5]] == [("a", "42"), ("b", "closed")]


def test_two_assistant_messages_in_a_row_stay_two():
    items = [USER, {"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}, USER]
    assert [each["content"] for each in ask(input=items).messages] == ["6 times 7?", "One.", "Two.", "6 times 7?"]


def test_reasoning_that_only_its_vendor_can_read_is_left_out():
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "?"}], "encrypted_content": "AAAA"}
    assert ask(input=[USER, sealed, USER]).messages == (ASKED, ASKED)
    assert ask(input=[USER, sealed, {"role": "assistant", "content": "42."}]).messages[1] == message("42.")


WRONG = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": {}}]}]}, "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [{"type": "picture"}]}]}, "input[0].content[0]"),
    ({"input": [USER, {"type": "wombat", "encrypted_content": "x"}]}, "input[1]"),
    ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1]"),
    ({"input": [{"id": "fc_0123-0_9"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": {"a": 1}}]}, "input[0].output"),
    ({"input": [{"type": ["message"], "role": "user", "content": "x"}]}, "input[0]"),
    ({"instructions": 5}, "instructions"),
    ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
    ({"previous_response_id": "0123-0"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "lark"}}}, "text.format"),
    ({"text": "plain"}, "text"),
    ({"include": "everything"}, "include"),
    ({"top_logprobs": "many"}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": ["multiply"]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "multiply"}}]}, "tools[0]"),
    ({"tools": [FUNCTION | {"parameters": "none"}]}, "tools[0].parameters"),
    ({"tools": [FUNCTION, FUNCTION | {"type": "custom"}]}, "tools[1]"),
    ({"tools": [{"type": "namespace", "name": "agents", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "divide"}}, "tool_choice"),
]


@pytest.mark.parametrize(("body", "name"), WRONG, ids=[f"{place}-{name}" for place, (_, name) in enumerate(WRONG)])
def test_what_cannot_be_done_is_refused_by_name(body, name):
    past = EarlierCalls({"0123-0": (ASKED, message("42."))})
    with pytest.raises(RequestError) as refusal:
        ask(past, **body)
    assert (refusal.value.status, refusal.value.param) == (400, name)


def test_what_is_not_done_is_listed():
    asked = {
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "parallel_tool_calls": False,
        "tools": [FUNCTION | {"strict": True}, {"type": "web_search"}, CUSTOM | {"format": {"type": "grammar"}}],
        "personality": "friendly",
        "moderation": None,
    }
    call = ask(**asked)
    assert set(call.ignored) == {
        *("reasoning.effort", "reasoning.summary", "include:reasoning.encrypted_content", "text.verbosity", "truncation"),
        *("tool:web_search", "tools.format", "personality"),
    }
    assert call.logprobs
    assert call.strict == {FUNCTION["name"]}


def test_labels_and_what_changes_nothing_pass():
    labels = {"store": False, "metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "k", "client_metadata": {"turn": "1"}}
    neutral = {"background": False, "truncation": "disabled", "text": {"format": {"type": "text"}}, "top_logprobs": 0}
    assert ask(**labels, **neutral, parallel_tool_calls=True, stream_options={"include_obfuscation": False}).ignored == ()


def test_sampling_fields_are_read():
    call = ask(max_output_tokens=9, temperature=0.5, top_p=0.9, top_k=7, stop=["x"], seed=3)
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 7)
    assert (sampling.stop, sampling.seed, ask().sampling.max_tokens) == (("x",), 3, 64)


def test_tools_reach_the_model_as_functions():
    grammar = CUSTOM | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
    functions = [tool["function"] for tool in ask(tools=[FUNCTION, NAMESPACE, grammar, {"type": "web_search"}]).tools]
    assert functions[0] == {"name": "multiply", "description": "Multiply.", "parameters": {"type": "object"}}
    assert [each["name"] for each in functions] == ["multiply", "agents__close", "patch"]
    assert functions[2]["parameters"]["required"] == ["input"]
    assert "lark grammar:\nstart: /x/" in functions[2]["description"]


CHOICES = [
    ("auto", None),
    ("required", ""),
    ({"type": "function", "name": "multiply"}, "multiply"),
    ({"type": "custom", "name": "patch"}, "patch"),
    ({"type": "function", "name": "close", "namespace": "agents"}, "agents__close"),
]


@pytest.mark.parametrize(("choice", "forced"), CHOICES)
def test_a_tool_can_be_demanded(choice, forced):
    call = ask(tools=[FUNCTION, CUSTOM, NAMESPACE], tool_choice=choice)
    assert (call.forced, call.reads_calls) == (forced, True)


def test_tool_choice_none_offers_tools_and_reads_no_calls():
    call = ask(tools=[FUNCTION], tool_choice="none")
    assert (len(call.tools), call.reads_calls, call.forced) == (1, False, None)


def test_an_earlier_response_is_continued_without_its_instructions():
    first = ask(instructions="Be brief.")
    past = EarlierCalls({"0123-0": (*first.messages, message("42."))})
    call = ask(past, previous_response_id="resp_0123-0", instructions="Be long.", input="Why?")
    said = [(each["role"], each["content"]) for each in call.messages]
    assert said == [("system", "Be long."), ("user", "6 times 7?"), ("assistant", "42."), ("user", "Why?")]


def test_a_system_message_of_the_input_carries_over():
    first = ask(input=[{"role": "system", "content": "Be brief."}, USER])
    past = EarlierCalls({"0123-0": (*first.messages, message("42."))})
    roles = [each["role"] for each in ask(past, previous_response_id="resp_0123-0", input="Why?").messages]
    assert roles == ["system", "user", "assistant", "user"]


def test_references_to_our_own_items_are_resolved():
    reply = message("Hm.", thought="I think", calls=[("multiply", '{"a": 6}'), ("patch", '{"input": "x"}')])
    past = EarlierCalls({"0123-0": (ASKED, reply)})
    named = ["rs_0123-0_0", "msg_0123-0_0", "fc_0123-0_0", "ctc_0123-0_1", "msg_0123-0_1"]
    result = {"type": "function_call_output", "call_id": "call_0", "output": "42"}
    call = ask(past, input=[USER, *({"type": "item_reference", "id": each} for each in named), result])
    assert call.messages[1] == reply


def test_a_history_that_grows_is_read_from_where_it_differs():
    past, items = EarlierCalls(), [USER, {"role": "assistant", "content": "42."}]
    first = ask(past, input=[USER], instructions="Be brief.")
    second = ask(past, input=[*items, USER], instructions="Be brief.")
    assert all(one is other for one, other in zip(first.messages, second.messages, strict=False))


REPLIES = [
    message(""),
    message("42."),
    message("", thought="Cut off"),
    message("It is 42.", thought="6 · 7 🙂"),
    message("Hm.", calls=[("multiply", '{"a": 6}'), ("multiply", '{"a": 7}')]),
    message("", calls=[("patch", '{"input": "*** Begin\\n+é\\ud83d\\ude42\\""}')], thought="Patch."),
    message("", calls=[("patch", '{"patch": "x"}'), ("agents__close", "{}"), ("unknown", "{}")]),
]
TOOLS = [FUNCTION, CUSTOM, NAMESPACE, {"type": "web_search"}]


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("reply", REPLIES)
def test_the_whole_answer_is_a_response_that_the_sdk_validates(reply, finish):
    body = whole(ask(tools=TOOLS, instructions="Be brief.", metadata={"a": "b"}), reply, finish)
    response = Response.model_validate(body, strict=True)
    assert response.id == "resp_0123-0"
    assert (response.status, response.instructions, response.metadata) == (body["status"], "Be brief.", {"a": "b"})
    assert response.output_text == (reply["content"] or "")
    assert response.usage.total_tokens == 3 + response.usage.output_tokens


def test_calls_come_back_under_names_and_kinds_that_client_knows():
    calls = [("multiply", '{"a": 6}'), ("agents__close", "{}"), ("patch", '{"input": "*** Begin\\n"}'), ("unknown", "{}")]
    items = whole(ask(tools=TOOLS), message(calls=calls))["output"]
    known = [(item["type"], item["name"], item.get("namespace")) for item in items]
    assert known == [
        ("function_call", "multiply", None),
        ("function_call", "close", "agents"),
        ("custom_tool_call", "patch", None),
        ("function_call", "unknown", None),
    ]
    assert (items[2]["input"], items[2]["call_id"], items[0]["arguments"]) == ("*** Begin\n", "call_2", '{"a": 6}')


def test_answer_that_was_cut_off_reports_it():
    body = whole(ask(), message("It is", thought="Hm."), "length")
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]
    assert "completed_at" not in body


@pytest.mark.parametrize("reply", REPLIES[:-1])
def test_a_reply_that_is_sent_back_means_the_same(reply):
    items = whole(ask(tools=TOOLS), reply)["output"]
    _, back, _ = ask(input=[USER, *items, USER], tools=TOOLS).messages
    assert message_digest(back) == message_digest(reply)
    assert back.get("reasoning_content") == reply.get("reasoning_content")


@given(st.sampled_from(REPLIES), st.integers(1, 12), st.integers(1, 4), st.sampled_from(["stop", "length"]))
def test_however_reply_is_cut_its_stream_ends_as_whole_answer(reply, size, batch, finish):
    call = ask(tools=TOOLS, stream=True, include=["message.output_text.logprobs"])
    answer, deltas = answer_to(call, reply, finish), list(deltas_in(reply, size))
    batches = [deltas[start : start + batch] for start in range(0, len(deltas), batch)]
    events = events_in(streamed(ResponsesDialect, answer, batches))
    assert events[-1]["response"] == whole(call, reply, finish)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    assert grown(events) == [shown(item) for item in events[-1]["response"]["output"]]


def grown(events):
    """What a client puts together from the deltas of each item."""
    items = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items[event["item"]["id"]] = ""
        elif event["type"].endswith(".delta"):
            items[event["item_id"]] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert shown(event["item"]) == items[event["item"]["id"]]
    return list(items.values())


def shown(item):
    return item.get("arguments", item.get("input")) if "call" in item["type"] else item["content"][0]["text"]


def test_a_stream_has_the_vendors_events_in_the_vendors_order():
    reply = message("42.", thought="Hm.", calls=[("multiply", "{}")])
    stream = streamed(ResponsesDialect, answer_to(ask(tools=TOOLS), reply), [[each] for each in deltas_in(reply)])
    assert [event["type"].removeprefix("response.") for event in events_in(stream)] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", "output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]


def test_text_after_a_call_stays_one_reply():
    reply = message("Hm. And then.", calls=[("multiply", "{}")])
    before, call = list(deltas_in(message("Hm.", calls=[("multiply", "{}")]))), ask(tools=TOOLS)
    stream = streamed(ResponsesDialect, answer_to(call, reply), [before, [Text(" And then.")]])
    items = events_in(stream)[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]
    assert len({item["id"] for item in items}) == 3
    assert message_digest(ask(input=[USER, *items], tools=TOOLS).messages[1]) == message_digest(reply)


def test_logprobs_come_with_the_text():
    call = ask(include=["message.output_text.logprobs"])
    part = whole(call, message("42."))["output"][0]["content"][0]
    assert [each["token"] for each in part["logprobs"]] == ["4", "2", "."]
    events = events_in(streamed(ResponsesDialect, answer_to(call, message("42.")), [[Text("4")], [Text("2.")]]))
    reported = [[each["token"] for each in event["logprobs"]] for event in events if event["type"] == "response.output_text.delta"]
    assert reported == [["4"], ["2", "."]]


def test_logprobs_of_deltas_that_come_together_are_reported_once():
    call = ask(include=["message.output_text.logprobs"])
    events = events_in(streamed(ResponsesDialect, answer_to(call, message("42.")), [[Text("4"), Text("2.")]]))
    reported = [len(event["logprobs"]) for event in events if event["type"] == "response.output_text.delta"]
    assert reported == [3, 0]


CODEX = {
    "model": "my-model",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a1de72",
    "client_metadata": {"turn_id": "1"},
    "tools": [FUNCTION | {"name": "exec_command"}, NAMESPACE, {"type": "web_search", "external_web_access": True}],
}
"""What the Codex CLI sends next to its input."""


def test_requests_of_coding_agent_pass_and_second_one_continues_first():
    asked = [
        {"type": "message", "id": f"msg_{n}", "role": role, "content": [{"type": "input_text", "text": f"{n}"}]}
        for n, role in enumerate(["developer", "developer", "user", "user"])
    ]
    first, past = ask(input=asked, **CODEX), EarlierCalls()
    reply = message("", thought="Write it.", calls=[("exec_command", '{"cmd": "ls"}'), ("agents__close", '{"id":1}')])
    echoed = events_in(streamed(ResponsesDialect, answer_to(first, reply), [list(deltas_in(reply))]))[-1]["response"]["output"]
    results = [{"type": "function_call_output", "id": "fco_1", "call_id": f"call_{n}", "output": "made"} for n in range(2)]
    second = ask(past, input=[*asked, *echoed, *results], **CODEX)
    assert second.messages[:4] == first.messages
    assert (message_digest(second.messages[4]), second.messages[4]["reasoning_content"]) == (message_digest(reply), "Write it.")
    assert second.ignored == ("include:reasoning.encrypted_content", "reasoning.summary", "tool:web_search")


def test_errors_and_counts_have_the_vendors_shape():
    dialect = ResponsesDialect(tokenizer())
    error = RequestError("no such thing", code="previous_response_not_found", param="previous_response_id")
    assert dialect.error(error)["error"]["code"] == "previous_response_not_found"
    (event,) = events_in(dialect.error_event(RequestError("the engine failed", status=502, code="engine_error")))
    assert (event["type"], event["code"], event["error"]["message"]) == ("error", "engine_error", "the engine failed")
    assert EVENT.validate_python(event).message == "the engine failed"
    assert dialect.count(7) == {"object": "response.input_tokens", "input_tokens": 7}


WORDS = ["message", "reasoning", "function_call", "function_call_output", "item_reference", "namespace", "custom", "function"]
KEYS = ["type", "role", "content", "text", "name", "tools", "id", "call_id", "arguments", "output", "input", "format", "parameters"]
scalars = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "user", "assistant", "input_text", "text", *WORDS])
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4), max_leaves=8
)
FIELDS = ["input", "tools", "tool_choice", "text", "include", "reasoning", "instructions", "previous_response_id", "stream", "seed"]


@given(st.dictionaries(st.sampled_from(FIELDS), junk))
def test_whatever_is_sent_is_read_or_refused(body):
    try:
        call = ask(**body)
    except RequestError as refusal:
        assert refusal.status == 400
    else:
        assert all(each["role"] in ("system", "user", "assistant", "tool") for each in call.messages)
        Response.model_validate(whole(call, message("42.")))


@given(st.text(), st.booleans(), st.integers(1, 5))
def test_freeform_input_survives_way_through_json_however_it_is_cut(text, plain, size):
    arguments = json.dumps({"input": text}, ensure_ascii=plain)
    reader = FreeformReader()
    parts = [reader.push(arguments[start : start + size]) for start in range(0, len(arguments), size)]
    assert "".join(parts) + reader.finish() == text == freeform_text(freeform_arguments(text))


BROKEN = [
    '{"input": "cut',
    '{"input": "a\\',
    '{"input": "a\\ud83d',
    '{"input": "\\q\\ud83dx"} rest',
    '{"patch": "x"}',
    "{",
    "",
    "text",
]


@given(st.one_of(st.sampled_from(BROKEN), st.text(alphabet='{}":\\ud8inpt ')), st.integers(1, 5))
def test_freeform_arguments_are_read_however_cut(arguments, size):
    reader = FreeformReader()
    parts = [reader.push(arguments[start : start + size]) for start in range(0, len(arguments), size)]
    read = "".join(parts) + reader.finish()
    assert read == freeform_text(arguments)
    read.encode()


def test_freeform_arguments_that_are_no_input_are_given_unchanged():
    assert [freeform_text(each) for each in BROKEN] == ["cut", "a", "a", "\\q\ufffdx", '{"patch": "x"}', "{", "", "text"]
