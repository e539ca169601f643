import json

import pytest
from chat_cases import MOVES_TOOLS, NATIVE_TOOLS, TOOLS, make_renderer
from hypothesis import given
from hypothesis import strategies as st
from reply_cases import added_up, cut_at, parse

from penstock.chat.parsers.base import Arguments, ParseOptions, ReasoningTags, Text, ToolCall
from penstock.chat.parsers.hermes import Hermes

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'
ONE = [("multiply", '{"a": 6}')]
THINK = ReasoningTags("<think>", "</think>")


def hermes(*, calls=True, eager=False, marks=None, thinking=False):
    return Hermes().parser(ParseOptions(calls, eager, marks, thinking))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        ("hello ", "hello ", []),
        (CALL, "", ONE),
        (f"  {CALL}\n", "", ONE),
        (f"Let me see.\n\n{CALL}", "Let me see.", ONE),
        (f"{CALL}\n{CALL}", "", ONE * 2),
        (f"a {CALL} b", "a b", ONE),
        (CALL.removesuffix("</tool_call>"), "", ONE),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": {"a":1} , "id": 7, "name": "f"}</tool_call>', "", [("f", '{"a":1}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"s": "}\\"</tool_call>\\\\"}}</tool_call>',
            "",
            [("f", '{"s": "}\\"</tool_call>\\\\"}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"n": 123456789012345678901234567890}}</tool_call>',
            "",
            [("f", '{"n": 123456789012345678901234567890}')],
        ),
        ('<tool_call>{} <tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>{}", [("f", "{}")]),
    ],
)
def test_calls_are_separated_from_text_and_arguments_are_models_own(said, text, calls, eager):
    assert parse(hermes(eager=eager), said) == ("", text, calls)


MALFORMED = [
    "<tool_call>",
    "<tool_call>{}",
    "text <tool_call>{}</tool_call> more ",
    "<tool_call>[1]</tool_call>",
    '<tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
    f"<tool_call>{'[' * 5000}</tool_call>",
    "a </tool_call> b <tool_ca",
]
BROKEN_LATE = [
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1}, "y": NaN}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1}} so</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "',
    '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 5000 + "</tool_call>",
]


@pytest.mark.parametrize("said", [*MALFORMED, *BROKEN_LATE])
def test_what_is_no_call_stays_text_to_the_letter(said):
    assert parse(hermes(), said) == ("", said, [])


@pytest.mark.parametrize("said", MALFORMED)
def test_a_malformed_head_is_text_for_an_eager_reader_too(said):
    assert parse(hermes(eager=True), said) == ("", said, [])


@pytest.mark.parametrize("said", BROKEN_LATE)
def test_call_that_breaks_after_head_stays_call_for_eager_reader(said):
    _, _, calls = parse(hermes(eager=True), said)
    assert [name for name, _ in calls] == ["f"]
    assert calls[0][1].startswith('{"x": ')


def test_without_calls_markup_is_text():
    assert parse(hermes(calls=False), f" {CALL}\n") == ("", f" {CALL}\n", [])


@pytest.mark.parametrize(
    ("said", "thinking", "expected"),
    [
        ("<think>\nSix sevens.\n</think>\n\nIt is 42.", False, ("Six sevens.", "It is 42.", [])),
        ("Six sevens.\n</think>\n\nIt is 42.", True, ("Six sevens.", "It is 42.", [])),
        ("<think>a</think>b", True, ("a", "b", [])),
        ("\n<think>\n\n</think>\n\nb", False, ("", "b", [])),
        ("</think>\n\nb", False, ("", "b", [])),
        ("never closed\n", True, ("never closed\n", "", [])),
        (f"draft {CALL}\n</think>\n{CALL}", True, (f"draft {CALL}", "", ONE)),
        ("It is <think>", False, ("", "It is <think>", [])),
        ("  <thin", False, ("", "  <thin", [])),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_reasoning_is_separated_from_text(said, thinking, expected, eager):
    assert parse(hermes(marks=THINK, thinking=thinking, eager=eager), said) == expected


def test_a_model_without_reasoning_may_speak_of_it():
    assert parse(hermes(), "<think>x</think>") == ("", "<think>x</think>", [])


SCRAPS = [
    *(CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", " ", "\n", "x", "<", "{}", "é", "<think>", "</think>", "\n\n"),
    *('{"name": "f", "arguments": ', '{"a": ["}', '"', "\\", "}", "}}", ", "),
]


@given(
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=10),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    eager=st.booleans(),
    thinking=st.booleans(),
)
def test_however_the_text_is_cut_it_says_the_same(scraps, cuts, eager, thinking):
    said = "".join(scraps)
    whole = parse(hermes(eager=eager, marks=THINK, thinking=thinking), said)
    assert parse(hermes(eager=eager, marks=THINK, thinking=thinking), *cut_at(said, cuts)) == whole
    assert parse(hermes(eager=eager, marks=THINK, thinking=thinking), *said) == whole


@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=10), eager=st.booleans())
def test_reply_without_call_is_all_text_to_letter(scraps, eager):
    said = "".join(scraps)
    read = parse(hermes(eager=eager), said)
    assert read.calls or read.text == said


@given(parts=st.lists(st.sampled_from(["", "a", "b <c>", "{}", "</tool_call>"]), min_size=1, max_size=5), eager=st.booleans())
def test_text_between_calls_is_all_there(parts, eager):
    read = parse(hermes(eager=eager), CALL.join(parts))
    assert read == ("", "".join(parts), ONE * (len(parts) - 1))


def test_text_that_cannot_become_a_call_is_not_held_back():
    parser = hermes()
    assert parser.push("hello <b") == [Text("hello <b")]
    assert parser.push(" <tool") == []
    assert parser.push("s>") == [Text(" <tools>")]


def test_an_eager_reader_gives_out_arguments_while_they_are_written():
    parser = hermes(eager=True)
    assert parser.push('<tool_call>\n{"name": "wri') == []
    assert parser.push('te", "arguments":') == []
    assert parser.push(' {"te') == [ToolCall("write", '{"te')]
    assert parser.push('xt": "a}b\\') == [Arguments('xt": "a}b\\')]
    assert parser.push('"c"') == [Arguments('"c"')]
    assert parser.push("}}\n</tool_call>") == [Arguments("}")]
    assert parser.finish() == []


@pytest.mark.parametrize("eager", [False, True])
def test_call_that_was_begun_for_model_is_read_on(eager):
    rest = ' {"a": 6}}\n</tool_call>'
    assert parse(hermes(eager=eager), Hermes().begin("multiply"), rest) == ("", "", ONE)
    assert parse(hermes(eager=eager), Hermes().begin(""), f'multiply", "arguments":{rest}') == ("", "", ONE)


def test_tools_come_after_the_callers_own_system_text():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    system = Hermes().offer(messages, TOOLS)[0]["content"]
    assert system.startswith("Be brief.\n\n")
    assert json.dumps(TOOLS[0]) in system
    assert Hermes().offer(messages[1:], TOOLS)[0]["role"] == "system"
    assert Hermes().offer(messages, ()) == messages


def test_tools_go_into_first_turn_of_templates_without_system_role():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    [turn] = Hermes().offer(messages, TOOLS, system=False)
    assert turn["role"] == "user"
    assert turn["content"].startswith("Be brief.\n\n")
    assert turn["content"].endswith("\n\nhi")


def test_calls_become_text_and_results_in_row_share_turn():
    call = {"id": "1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}}
    results = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("42", "43")]
    reply = {"role": "assistant", "content": "Hm.", "reasoning_content": "So.", "tool_calls": [call]}
    plain = Hermes().flatten([reply, *results, {"role": "user", "content": "so?"}])
    assert [m["role"] for m in plain] == ["assistant", "user", "user"]
    assert plain[0] == {"role": "assistant", "content": f"Hm.\n{CALL}", "reasoning_content": "So."}
    assert plain[1]["content"] == "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>"


def test_call_that_was_written_is_read_back_unchanged():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1, {"x": "</s>"}]}'}}
    text = Hermes().flatten([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]["content"]
    assert parse(hermes(), text) == ("", "", [("f", '{"é": [1, {"x": "</s>"}]}')])


def test_templates_without_tools_get_the_hermes_form(tmp_path):
    assert make_renderer(tmp_path / "native", NATIVE_TOOLS).native_tools
    assert make_renderer(tmp_path / "moved", MOVES_TOOLS).native_tools
    plain = make_renderer(tmp_path / "plain")
    assert not plain.native_tools
    assert "<tools>" in plain.tokenizer.decode(plain.root([{"role": "user", "content": "hi"}], TOOLS))


def test_native_format_that_nobody_can_read_gets_hermes_form(tmp_path):
    template = "{% if tools %}[TOOLS]{% endif %}{{ messages[0].content }}"
    renderer = make_renderer(tmp_path, template)
    assert not renderer.native_tools
    assert "<tool_call>" in renderer.tokenizer.decode(renderer.root([{"role": "user", "content": "hi"}], TOOLS))


def test_pieces_add_up_to_one_message():
    pieces = [Text("a"), ToolCall("f", "{"), Arguments("}"), Text("b"), ToolCall("g", "{}")]
    assert added_up(pieces) == ("", "ab", [("f", "{}"), ("g", "{}")])
