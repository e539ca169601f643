import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reply_cases import added_up, cut_at, parse

from penstock.chat.parsers import TOOL_FORMATS
from penstock.chat.parsers.base import Arguments, ParseOptions, Reasoning, ReasoningTags, Text, ToolCall, find_reasoning_tags
from penstock.chat.parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from templates.template_cases import FAMILIES
from templates.template_cases import HERE as TEMPLATES

EAGER = pytest.mark.parametrize("eager", [False, True])
A6 = ("multiply", '{"a": 6}')
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "lines": {"type": "array"},
                "count": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "maybe": {"type": ["string", "null"]},
            }
        },
    },
}


def parser(form, *, calls=True, eager=False, tools=(), marks=None):
    return TOOL_FORMATS.load(form)().parser(ParseOptions(calls, eager, marks, False, tools))


class Form(NamedTuple):
    """How one family writes."""

    call: str
    """Of multiply with a = 6."""
    two: str
    """The same twice."""
    scraps: tuple[str, ...]
    """What malformed replies are made of."""


SEEK = (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)
BEGIN, CALL, SEP, END, ENDS = SEEK
V3 = f'{CALL}function{SEP}multiply\n```json\n{{"a": 6}}\n```{END}'
V31 = f'{CALL}multiply{SEP}{{"a": 6}}{END}'
OSS = '<|channel|>commentary to=functions.multiply <|constrain|>json<|message|>{"a": 6}<|call|>'
XML = "<tool_call>\n<function=multiply>\n<parameter=a>\n6\n</parameter>\n</function>\n</tool_call>"
JSON = '{"name": "multiply", "parameters": {"a": 6}}'
OLD = '{"name": "multiply", "arguments": {"a": 6}, "id": "abcdefghi"}'

FORMS = {
    "llama": Form(JSON, f"{JSON}; {JSON}", ("<|python_tag|>", JSON, ";", "{", '"name": "f"', ', "parameters": ', "}", '"')),
    "mistral": Form(f"[TOOL_CALLS] [{OLD}]", f"[TOOL_CALLS][{OLD}, {OLD}]", ("[TOOL_CALLS]", "[", OLD, ",", "]", "{", "}", '"')),
    "mistral_named": Form(
        '[TOOL_CALLS]multiply[ARGS]{"a": 6}',
        '[TOOL_CALLS]multiply[CALL_ID]abcdefghi[ARGS]{"a": 6}[TOOL_CALLS]multiply{"a": 6}',
        ("[TOOL_CALLS]", "f", "[ARGS]", "[CALL_ID]", '{"a": ', '"', "}", "["),
    ),
    "pythonic": Form(
        "[multiply(a=6)]",
        "[multiply(a=6), multiply(a = 6,)]",
        ("[", "f(", "a=", "'x", "'", ",", ")", "]", "\\", "6"),
    ),
    "deepseek": Form(
        f"{BEGIN}{V3}{ENDS}",
        f"{BEGIN}{V3}\n{V3}{ENDS}",
        (*SEEK, "function", "f", "\n```json\n", '{"a": ', '"}', "```"),
    ),
    "deepseek_plain": Form(f"{BEGIN}{V31}{ENDS}", f"{BEGIN}{V31}{V31}{ENDS}", (*SEEK, "f", '{"a": ', '"', "}")),
    "qwen_xml": Form(
        XML,
        f"{XML}\n{XML}",
        (*XML.partition("6")[::2], "6", "\n", "<function=f>", "</function>", "<parameter=b>", "</"),
    ),
    "harmony": Form(
        OSS,
        f"{OSS}<|start|>assistant{OSS}",
        ("<|start|>", "assistant", "<|channel|>", "final", "analysis", " to=functions.f", "<|message|>", "<|end|>", "{", '"', "<"),
    ),
}


@EAGER
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read(form, eager):
    written = FORMS[form]
    assert parse(parser(form, eager=eager), written.call) == ("", "", [A6])
    assert parse(parser(form, eager=eager), *written.two) == ("", "", [A6, A6])
    assert parse(parser(form, calls=False, eager=eager), written.call).calls == []


@EAGER
@pytest.mark.parametrize("form", FORMS)
def test_a_begun_call_is_read_on(form, eager):
    begin = TOOL_FORMATS.load(form)().begin
    named, any_tool = begin("multiply"), begin("")
    assert any_tool and named.startswith(any_tool)
    written = FORMS[form].call.replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    for begun in (named, any_tool):
        assert written.startswith(begun)
        assert parse(parser(form, eager=eager), begun, written.removeprefix(begun)) == ("", "", [A6])


@given(
    form=st.sampled_from(sorted(FORMS)),
    eager=st.booleans(),
    choice=st.lists(st.integers(0, 100), max_size=10),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_however_the_text_is_cut_it_says_the_same(form, eager, choice, cuts):
    scraps = (FORMS[form].call, " ", "x", *FORMS[form].scraps)
    said = "".join(scraps[number % len(scraps)] for number in choice)
    whole = parse(parser(form, eager=eager), said)
    assert parse(parser(form, eager=eager), *cut_at(said, cuts)) == whole
    assert parse(parser(form, eager=eager), *said) == whole
    assert form == "harmony" or whole.calls or whole.text == said


@EAGER
@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("llama", '{"answer": 42}'),
        ("llama", 'It is {"name": "f", "parameters": {}}'),
        ("llama", "<|python_tag|>print(6 * 7)"),
        ("llama", '{"name": "f", "parameters": [1]}'),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral_named", "[TOOL_CALLS]f[ARGS]none"),
        ("pythonic", "[see(this)](that)"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a={1})]"),
        ("pythonic", "[1, 2]"),
        ("deepseek", f"{BEGIN}{ENDS}"),
        ("deepseek", f"{CALL}function{SEP}f\n```json\nnone\n```{END}"),
        ("qwen_xml", "<tool_call>\n{}\n</tool_call>"),
        ("qwen_xml", "<function=f"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>none"),
        ("harmony", "<|channel|>commen"),
        ("harmony", "no header\nat all"),
    ],
)
def test_malformed_calls_are_text_to_the_letter(form, said, eager):
    assert parse(parser(form, eager=eager), said) == ("", said, [])


@pytest.mark.parametrize("form", FORMS)
def test_unfinished_call_is_text_unless_read_eagerly(form):
    cut = FORMS[form].call.partition("6")[0]
    assert parse(parser(form), cut) == ("", cut, [])
    eager = parse(parser(form, eager=True), cut)
    assert eager == ("", cut, []) if form == "pythonic" else eager == ("", "", [("multiply", '{"a": ')])


def test_a_broken_call_leaves_the_ones_before_it():
    said = f'{FORMS["llama"].call}; {{"name": "f"}}'
    assert parse(parser("llama"), said) == ("", '; {"name": "f"}', [A6])
    assert parse(parser("mistral"), f"[TOOL_CALLS][{OLD}, {{}}]") == ("", ", {}]", [A6])


@EAGER
def test_python_literals_become_json(eager):
    said = "[f(s='a\"b, (c', n=-1.5, l=[1, {'x': None}], t=True, j=true), ns.g()]"
    expected = [("f", '{"s": "a\\"b, (c", "n": -1.5, "l": [1, {"x": null}], "t": true, "j": true}'), ("ns.g", "{}")]
    assert parse(parser("pythonic", eager=eager), *said) == ("", "", expected)


def xml(**values):
    return "<function=write>\n" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items()) + "</function>"


@EAGER
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"text": '{"a": 1}'}, {"text": '{"a": 1}'}),
        ({"text": "  line\n\n"}, {"text": "  line\n\n"}),
        ({"text": '6 "é"\\'}, {"text": '6 "é"\\'}),
        ({"lines": "[1, 2]"}, {"lines": [1, 2]}),
        ({"lines": "no list"}, {"lines": "no list"}),
        ({"count": "6"}, {"count": 6}),
        ({"count": "6.5"}, {"count": "6.5"}),
        ({"maybe": "None"}, {"maybe": None}),
        ({"maybe": "6"}, {"maybe": "6"}),
        ({"other": "True", "more": "x"}, {"other": True, "more": "x"}),
        ({}, {}),
    ],
)
def test_arguments_without_json_are_read_by_their_schema(written, meant, eager):
    [(name, arguments)] = parse(parser("qwen_xml", eager=eager, tools=[WRITE]), *xml(**written)).calls
    assert (name, json.loads(arguments)) == ("write", meant)


def test_a_text_argument_is_given_out_while_it_is_written():
    reader = parser("qwen_xml", eager=True, tools=[WRITE])
    assert added_up(reader.push("<function=write><parameter=text>\n")).calls == [("write", '{"text": "')]
    assert reader.push('a"\n') == [Arguments('a\\"')]
    assert reader.push("b") == [Arguments("\\nb")]
    assert reader.push("\n</parameter></function>") == [Arguments('"'), Arguments("}")]


@EAGER
def test_channels_become_reasoning_text_and_calls(eager):
    said = (
        "<|channel|>analysis<|message|>Six <sevens>.<|end|><|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": "<|"}<|call|>'
    )
    assert parse(parser("harmony", eager=eager), *said) == ("Six <sevens>.", "I ask.", [("f", '{"x": "<|"}')])
    assert parse(parser("harmony"), "<|channel|>final<|message|>It is 42.<|return|>") == ("", "It is 42.", [])


def test_harmony_streams_what_is_certain():
    reader = parser("harmony", eager=True)
    assert reader.push("<|channel|>analysis<|mess") == []
    assert reader.push("age|>Six <") == [Reasoning("Six ")]
    assert reader.push("b><|end|><|start|>assistant<|channel|>final<|message|>It") == [Reasoning("<b>"), Text("It")]
    assert reader.push("<|start|>assistant<|channel|>commentary to=functions.f<|message|>{") == [ToolCall("f", "{")]


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("{{ '<think>' }}", ReasoningTags("<think>", "</think>")),
        ("split('</think>')", ReasoningTags("<think>", "</think>")),
        ("[THINK]", ReasoningTags("[THINK]", "[/THINK]")),
        ("think", None),
    ],
)
def test_marks_of_reasoning_are_found_in_the_template(source, marks):
    assert find_reasoning_tags(source) == marks


NATIVE = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3 without thinking": "hermes",
    "llama3": "llama",
    "mistral v3": "mistral",
    "mistral v7": "mistral",
    "deepseek v3": "deepseek",
    "deepseek r1": "deepseek",
    "harmony": "harmony",
}


def test_each_template_is_recognised():
    for name, family in FAMILIES.items():
        if not family.template:
            continue  # the real model's own
        source = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
        matching = [form for form in TOOL_FORMATS if TOOL_FORMATS.load(form)().matches(source)]
        assert matching == ([NATIVE[name]] if name in NATIVE else [])


@pytest.mark.parametrize(
    ("form", "template"),
    [
        ("qwen_xml", "<tool_call>\n<function=example>\n<parameter=one>"),
        ("mistral_named", "'[TOOL_CALLS]' + call.function.name + '[ARGS]'"),
        ("deepseek_plain", f"'{BEGIN}{CALL}' + call.function.name + '{SEP}'"),
        ("pythonic", "[func_name1(params_name1=params_value1, params_name2=params_value2...)]"),
    ],
)
def test_forms_of_one_family_are_distinguished(form, template):
    assert [name for name in TOOL_FORMATS if TOOL_FORMATS.load(name)().matches(template)] == [form]


def test_no_form_takes_template_that_writes_otherwise_inside_same_tags():
    assert not any(TOOL_FORMATS.load(name)().matches("<tool_call>{name}\n<arg_key>") for name in TOOL_FORMATS)
