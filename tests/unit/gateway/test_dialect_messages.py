import json

import orjson
import pytest
from messages_cases import DIALECT, OURS, TOOL, USER, Before, accumulated, block, parse, refused, step, streamed, text, whole

from penstock.chat.parsers.base import Reasoning, Text
from penstock.chat.templates import message_digest
from penstock.errors import RequestError
from penstock.gateway.reply import CallDelta
from penstock.records import Sampling

# What requests ask for


def test_every_sampling_field_is_taken_over():
    call = parse(USER, max_tokens=7, temperature=1.5, top_p=0.5, top_k=3, min_p=0.1, seed=4, stop_sequences=["x", "y"], stream=True)
    assert call.sampling == Sampling(max_tokens=7, temperature=1.5, top_p=0.5, top_k=3, min_p=0.1, seed=4, stop=("x", "y"))
    assert (call.stream, call.ignored, call.model) == (True, (), "any")


def test_what_is_not_given_comes_from_the_run():
    defaults = Sampling(max_tokens=5, temperature=0.3, stop=("z",))
    call = DIALECT.parse({"messages": [USER]}, defaults, Before())
    assert (call.sampling, call.forced, call.reads_calls) == (defaults, None, False)


def test_system_stands_first_whether_string_or_blocks():
    blocks = [block("text", text="Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")]
    assert parse(USER, system="Be brief.\nBe kind.").messages == parse(USER, system=blocks).messages
    assert parse(USER, system=blocks).messages[0] == {"role": "system", "content": "Be brief.\nBe kind."}
    assert [m["role"] for empty in ("", [], None, [text("")]) for m in parse(USER, system=empty).messages] == ["user"] * 4


def test_what_system_says_to_vendor_is_left_out_and_counted():
    header = text("x-anthropic-billing-header: cc_version=2.1; cch=1f3;")
    call = parse(USER, system=[header, text("Be brief.")])
    assert call.messages[0]["content"] == "Be brief."
    assert call.ignored == ("system:billing_header",)


def test_results_come_before_texts_of_a_turn():
    result = block("tool_result", tool_use_id="a", content="42", is_error=False)
    other = block("tool_result", tool_use_id="b", content=[text("4"), text("3")])
    call = parse(
        USER, {"role": "assistant", "content": "so"}, {"role": "user", "content": [text("hm"), result, other, text("go on")]}
    )
    assert call.messages[2:] == (
        {"role": "tool", "content": "42", "tool_call_id": "a"},
        {"role": "tool", "content": "4\n3", "tool_call_id": "b"},
        {"role": "user", "content": "hm\ngo on"},
    )


@pytest.mark.parametrize(
    ("said", "read"),
    [("no such file", "Error: no such file"), ("Error: none", "Error: none"), ("<tool_use_error>x", "<tool_use_error>x")],
)
def test_result_that_is_error_reports_it(said, read):
    call = parse({"role": "user", "content": [block("tool_result", tool_use_id="a", content=said, is_error=True)]})
    assert call.messages[0]["content"] == read


def test_assistant_turn_is_one_message_when_sent_back_in_pieces():
    thinking = block("thinking", thinking="6 * 7", signature="s")
    use = block("tool_use", id="call_1", name="multiply", input={"a": 6})
    whole_turn = {"role": "assistant", "content": [thinking, text("So"), use, text(" it is")]}
    pieces = [{"role": "assistant", "content": [each]} for each in whole_turn["content"]]
    assert parse(USER, whole_turn, USER).messages == parse(USER, *pieces, USER).messages
    assert parse(USER, whole_turn, USER).messages[1] == {
        "role": "assistant",
        "content": "So it is",
        "reasoning_content": "6 * 7",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "multiply", "arguments": '{"a":6}'}}],
    }


def test_turns_in_a_row_by_the_user_are_one():
    result = block("tool_result", tool_use_id="a", content="42")
    apart = parse({"role": "user", "content": "a"}, {"role": "user", "content": [result]}, {"role": "user", "content": "b"})
    assert [message["role"] for message in apart.messages] == ["tool", "user"]
    assert apart.messages == parse({"role": "user", "content": [text("a"), result, text("b")]}).messages


def test_system_messages_between_turns_stay_where_they_are():
    call = parse(USER, {"role": "system", "content": "now"}, {"role": "system", "content": [text("then")]})
    assert [(m["role"], m["content"]) for m in call.messages[1:]] == [("system", "now"), ("system", "then")]


def test_labels_of_blocks_come_and_go_without_changing_anything():
    marked = {"role": "user", "content": [text("a") | {"cache_control": {"type": "ephemeral"}}, text("b") | {"citations": None}]}
    assert parse(marked).messages == parse({"role": "user", "content": [text("a"), text("b")]}).messages


def test_tools_become_functions_with_their_schema():
    call = parse(
        USER, tools=[TOOL | {"cache_control": {"type": "ephemeral"}}, {"name": "bare", "type": "custom", "input_schema": {}}]
    )
    assert [tool["function"] for tool in call.tools] == [OURS, {"name": "bare", "parameters": {}}]
    assert (call.reads_calls, call.ignored) == (True, ())


def test_hosted_tools_are_left_out_and_counted():
    hosted = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    call = parse(USER, tools=[*hosted, TOOL])
    assert [tool["function"]["name"] for tool in call.tools] == ["multiply"]
    assert call.ignored == ("tool:bash_20250124", "tool:web_search_20250305")
    error = refused(USER, tools=[*hosted, TOOL], tool_choice={"type": "tool", "name": "web_search"})
    assert error.param == "tool_choice"
    assert "'web_search'" in str(error)
    assert "multiply" in str(error)
    assert "a call" in str(refused(USER, tools=hosted, tool_choice={"type": "any"}))


@pytest.mark.parametrize(
    ("choice", "forced", "reads"),
    [
        ({"type": "auto"}, None, True),
        ({"type": "none"}, None, False),
        ({"type": "any"}, "", True),
        ({"type": "tool", "name": "multiply"}, "multiply", True),
    ],
)
def test_tool_choice_is_honoured(choice, forced, reads):
    call = parse(USER, tools=[TOOL], tool_choice=choice)
    assert (call.forced, call.reads_calls) == (forced, reads)


def test_what_cannot_be_done_is_counted_by_name():
    call = parse(
        USER,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        tools=[TOOL | {"strict": True, "eager_input_streaming": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        mcp_servers=[{"name": "x"}],
        wombat=1,
        container=None,
        metadata={"user_id": "u"},
        service_tier="auto",
    )
    counted = ("context_management", "mcp_servers", "output_config.effort", "thinking")
    assert call.ignored == (*counted, "wombat")
    assert call.one_call
    assert call.strict == {TOOL["name"]}


def test_thinking_switched_off_asks_for_nothing():
    assert parse(USER, thinking={"type": "disabled"}, n=1).ignored == ()


def test_redacted_thinking_is_left_out_and_counted():
    call = parse(USER, {"role": "assistant", "content": [block("redacted_thinking", data="x"), text("hi")]}, USER)
    assert call.messages[1] == {"role": "assistant", "content": "hi"}
    assert call.ignored == ("block:redacted_thinking",)


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"role": "user", "content": [text("a"), block("image", source={})]}, "messages[1].content[1].source"),
        ({"role": "user", "content": [block("document", source={})]}, "messages[1].content[0].source"),
        (
            {"role": "user", "content": [block("tool_result", tool_use_id="a", content=[text("a"), block("image")])]},
            "messages[1].content[0].content[1].source",
        ),
        ({"role": "user", "content": [block("tool_result", content="a")]}, "messages[1].content[0].tool_use_id"),
        ({"role": "assistant", "content": [block("wombat", id="a")]}, "messages[1].content[0]"),
        ({"role": "assistant", "content": [block("tool_use", id="a", input={})]}, "messages[1].content[0].name"),
        ({"role": "tool", "content": "a"}, "messages[1].role"),
        ({"role": "user", "content": [text(3)]}, "messages[1].content[0].text"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
        ({"role": "user", "content": {"a": 1}}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ("hello", "messages[1]"),
    ],
)
def test_block_that_cannot_be_read_is_rejected_by_its_place(turn, param):
    assert refused({"role": "assistant", "content": "x"}, turn).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"system": [block("image")]}, "system[0].source"),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": 3}}, "output_format.schema"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"n": 2}, "n"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thread": {"type": "fork"}}, "thread"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused_by_name(body, param):
    assert refused(USER, **body).param == param


def test_a_reply_that_is_begun_is_gone_on_with():
    begun = {"role": "assistant", "content": "It is"}
    call = parse(USER, begun)
    assert (call.prefill, call.messages) == ("It is", (USER,))
    assert parse(USER, begun, max_tokens=None).messages[-1] == begun
    assert refused(begun).param == "messages"
    assert refused(USER, {"role": "assistant", "content": [block("tool_use", id="a", name="f", input={})]}).param == "messages"
    form = {"format": {"type": "json_schema", "schema": {}}}
    assert refused(USER, begun, output_config=form)


def test_input_nested_too_deep_is_refused():
    deep = []
    for _ in range(100):
        deep = [deep]
    assert refused(USER, {"role": "assistant", "content": [block("tool_use", id="a", name="f", input={"x": deep})]}, USER)


def test_thread_continues_from_what_was_recorded():
    said = ({"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "42"})
    past = Before("abc-0", said, [{"type": "function", "function": OURS}])
    call = parse(USER, past=past, thread={"type": "continue", "previous_message_id": "msg_abc-0"})
    assert call.messages == (*said, USER)
    assert (call.tools[0]["function"], call.reads_calls, call.ignored) == (OURS, True, ())
    assert parse(USER, thread={"type": "create"}).ignored == ()


def test_thread_that_is_not_known_reports_client_to_send_everything():
    error = refused(USER, thread={"type": "continue", "previous_message_id": "msg_other"})
    assert error.status == 404
    assert DIALECT.error(error)["error"]["details"]["error_code"] == "thread_not_found"


def test_a_history_sent_again_is_not_read_again():
    past = Before()
    reply = {"role": "assistant", "content": [text("42")]}
    first = parse(USER, past=past, system="Be brief.")
    second = parse(USER, reply, USER, past=past, system="Be brief.")
    assert all(one is other for one, other in zip(first.messages, second.messages, strict=False))


# What answers look like


def test_an_answer_has_the_vendors_shape():
    calls = [{"id": "call_1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6.0}'}}]
    made = step({"content": "So", "reasoning_content": "hm", "tool_calls": calls}, sampled="abcd\0")
    assert whole(made) == {
        "id": "msg_abc-0",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "penstock:abc-0"},
            {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "call_1", "name": "multiply", "input": {"a": 6.0}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 5},
    }


@pytest.mark.parametrize(
    ("made", "reason", "sequence"),
    [
        (step({}, sampled="hi\0"), "end_turn", None),
        (step({}, sampled="hi\0", stop=("i",)), "end_turn", None),
        (step({}, sampled="hi", finish="length"), "max_tokens", None),
        (step({}, sampled="go STOP", stop=("x", "STOP")), "stop_sequence", "STOP"),
        (step({}, sampled="", stop=("x",)), "end_turn", None),
    ],
)
def test_why_a_reply_ended_is_reported(made, reason, sequence):
    assert (whole(made)["stop_reason"], whole(made)["stop_sequence"]) == (reason, sequence)
    assert streamed([], made)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_empty_reply_is_one_empty_text():
    assert whole(step({}))["content"] == [{"type": "text", "text": ""}]
    assert accumulated(streamed([], step({})))["content"] == [{"type": "text", "text": ""}]


def test_non_object_arguments_survive_a_round_trip():
    for written in ('{"a": ', "[1]", "six", "NaN"):
        calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": written}}]
        made = step({"content": None, "tool_calls": calls})
        sent = whole(made)["content"]
        assert sent[0]["input"] == {"INVALID_JSON": written}
        back = parse(USER, {"role": "assistant", "content": sent}, USER).messages[1]
        assert message_digest(back) == message_digest(made.message)


def test_arguments_that_claude_code_could_not_parse_come_back_unchanged():
    def back(given):
        use = block("tool_use", id="a", name="f", input={"__unparsedToolInput": given})
        return parse(USER, {"role": "assistant", "content": [use]}, USER).messages[1]["tool_calls"][0]["function"]["arguments"]

    assert back({"raw": '{"é😀', "len": 5}) == '{"é😀'
    assert json.loads(back({"raw": "x" * 10, "len": 5000})) == {"__unparsedToolInput": {"raw": "x" * 10, "len": 5000}}


def test_text_after_a_call_is_a_block():
    deltas = [Text("a"), CallDelta(0, "call_1", "f", "{}"), Text("b"), Text("c")]
    events = streamed(deltas, step({}))
    assert [each["type"] for each in accumulated(events)["content"]] == ["text", "tool_use", "text"]


def test_thinking_is_signed_before_it_ends():
    events = streamed([Reasoning("hm"), Text("So")], step({}))
    kinds = [event.get("delta", {}).get("type") or event["type"] for event in events[1:6]]
    assert kinds == ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop", "content_block_start"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (410, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors_have_the_vendors_names(status, kind):
    error = RequestError("no", status=status, code="why", param="what")
    inside = {"type": kind, "message": "no", "details": {"error_code": "why", "param": "what"}}
    assert DIALECT.error(error) == {"type": "error", "error": inside}
    name, sent = DIALECT.error_event(error).strip().split(b"\n")
    assert (name, orjson.loads(sent.removeprefix(b"data: "))) == (b"event: error", {"type": "error", "error": inside})


def test_overlong_prompt_is_reported_in_known_words():
    error = RequestError("the prompt has 5000 tokens; the context holds 4096 with the reply", code="context_length_exceeded")
    assert DIALECT.error(error)["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"
    error = RequestError("too much", code="context_length_exceeded")
    assert DIALECT.error(error)["error"]["message"] == "prompt is too long: too much"


def test_a_ping_is_an_event_and_counts_are_input_tokens():
    assert DIALECT.ping == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert DIALECT.count(7) == {"input_tokens": 7}
