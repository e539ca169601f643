import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_cases import MOVES_TOOLS, NATIVE_TOOLS, TOOLS, make_renderer

from penstock.render.hermes import Hermes, HermesParser
from penstock.render.tools import Text, ToolCall

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'


def parse(*pushes):
    parser = HermesParser()
    pieces = [piece for text in pushes for piece in parser.push(text)] + parser.finish()
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return text, [piece for piece in pieces if isinstance(piece, ToolCall)]


ONE = [ToolCall("multiply", '{"a": 6}')]


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        ("hello ", "hello ", []),
        (CALL, "", ONE),
        (f"  {CALL}\n", "", ONE),
        (f"Let me see.\n\n{CALL}", "Let me see.", ONE),
        (f"{CALL}\n{CALL}", "", ONE * 2),
        (f"a {CALL} b", "a b", ONE),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [ToolCall("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"n": 123456789012345678901234567890}}</tool_call>',
            "",
            [ToolCall("f", '{"n": 123456789012345678901234567890}')],
        ),
    ],
)
def test_calls_are_told_from_text(said, text, calls):
    assert parse(said) == (text, calls)


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>",
        "<tool_call>{}",
        "text <tool_call>{}</tool_call> more ",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        f"<tool_call>{'[' * 5000}</tool_call>",
        "a </tool_call> b <tool_ca",
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(said):
    assert parse(said) == (said, [])


SCRAPS = [CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", " ", "\n", "x", "<", "{}", "é"]


@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=8), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_however_the_text_is_cut_it_says_the_same(scraps, cuts):
    said = "".join(scraps)
    places = sorted({0, len(said), *(cut % (len(said) + 1) for cut in cuts)})
    assert parse(*(said[a:b] for a, b in pairwise(places))) == parse(said)


def test_text_that_cannot_become_a_call_is_not_held_back():
    parser = HermesParser()
    assert parser.push("hello <b") == [Text("hello <b")]
    assert parser.push(" <tool") == []
    assert parser.push("s>") == [Text(" <tools>")]


def test_tools_come_after_the_callers_own_system_text():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    system = Hermes().offer(messages, TOOLS)[0]["content"]
    assert system.startswith("Be brief.\n\n")
    assert json.dumps(TOOLS[0]) in system
    assert Hermes().offer(messages[1:], TOOLS)[0]["role"] == "system"
    assert Hermes().offer(messages, ()) == messages


def test_calls_become_text_and_results_in_a_row_share_a_turn():
    call = {"id": "1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}}
    results = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("42", "43")]
    plain = Hermes().flatten(
        [{"role": "assistant", "content": "Hm.", "tool_calls": [call]}, *results, {"role": "user", "content": "so?"}]
    )
    assert [m["role"] for m in plain] == ["assistant", "user", "user"]
    assert plain[0]["content"] == f"Hm.\n{CALL}"
    assert plain[1]["content"] == "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>"


def test_a_call_that_was_written_is_read_back_as_it_was():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1, {"x": "</s>"}]}'}}
    text = Hermes().flatten([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]["content"]
    assert parse(text) == ("", [ToolCall("f", '{"é": [1, {"x": "</s>"}]}')])


def test_templates_that_render_tools_keep_them_and_others_get_the_hermes_form(tmp_path):
    assert make_renderer(tmp_path / "native", NATIVE_TOOLS).native_tools
    assert make_renderer(tmp_path / "moved", MOVES_TOOLS).native_tools
    plain = make_renderer(tmp_path / "plain")
    assert not plain.native_tools
    assert "<tools>" in plain.tokenizer.decode(plain.root([{"role": "user", "content": "hi"}], TOOLS))


def test_a_native_format_that_nobody_can_read_gets_the_hermes_form(tmp_path):
    template = "{% if tools %}[TOOLS]{% endif %}{{ messages[0].content }}"
    renderer = make_renderer(tmp_path, template)
    assert not renderer.native_tools
    assert "<tool_call>" in renderer.tokenizer.decode(renderer.root([{"role": "user", "content": "hi"}], TOOLS))
