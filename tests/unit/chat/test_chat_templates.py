from datetime import datetime

import pytest
from chat_cases import ALTERNATING, DROPS_REASONING, MOVES_TOOLS, NATIVE_TOOLS, TOOLS

from penstock.chat.templates import ChatTemplate, canonical_json, chain_digest, flatten, has_reasoning, message_digest, tools_digest
from penstock.chat.tokenizer import Tokenizer
from penstock.errors import ModelError, RenderError
from penstock.testing import CHATML, write_tokenizer

CALL = {"id": "call_1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6, "b": "é"}'}}
TALK = [
    {"role": "user", "content": " What is\n6 times 7? 🙂"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": ""},
]


def for_transformers(messages):
    """Templates expect arguments as a value."""
    value = {"name": "multiply", "arguments": {"a": 6, "b": "é"}}
    return [m | {"tool_calls": [{**CALL, "function": value}]} if "tool_calls" in m else m for m in messages]


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("template", [CHATML, NATIVE_TOOLS, DROPS_REASONING, MOVES_TOOLS])
def test_text_and_ids_equal_those_of_transformers(tmp_path, template, tools, generate):
    from transformers import AutoTokenizer  # slow to import: only the process that runs this file should

    folder = write_tokenizer(tmp_path, template=template)
    tokenizer, reference = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate(template, tokenizer.named).render(TALK, tools, generate=generate)
    options = {"tools": list(tools) or None, "add_generation_prompt": generate}
    assert ours == reference.apply_chat_template(for_transformers(TALK), tokenize=False, **options)
    assert tokenizer.encode(ours) == reference.apply_chat_template(
        for_transformers(TALK), tokenize=True, return_dict=False, **options
    )


def test_a_template_that_refuses_says_why():
    template = ChatTemplate(ALTERNATING, {})
    with pytest.raises(RenderError, match="alternate"):
        template.render([TALK[0], TALK[0]], generate=True)


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1/0 }}", "{{ nothing.at.all }}"])
def test_a_hostile_template_is_refused_not_run(attack):
    with pytest.raises(RenderError):
        ChatTemplate(attack, {}).render(TALK, generate=True)


def test_a_template_with_a_syntax_error_is_a_model_error():
    with pytest.raises(ModelError, match="compiled"):
        ChatTemplate("{% if %}", {})


def test_generation_marks_dates_and_special_tokens_are_there():
    source = "{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%Y') | length }}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "hi"}], generate=True) == "<s>hi4"


def test_the_time_can_be_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {})
    assert template.render([{"role": "user", "content": "hi"}], generate=True, now=datetime(2024, 7, 26)) == "26 Jul 2024"


def test_reasoning_has_both_the_names_that_templates_use():
    template = ChatTemplate("{{ messages[0].reasoning_content + '|' + messages[0].thinking }}", {})
    assert template.render([reply(reasoning_content="hm")], generate=False) == "hm|hm"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "x"}, False),
        ({"content": None, "reasoning_content": ""}, False),
        ({"content": "", "reasoning_content": "hm"}, True),
        ({"content": "hm</think>x"}, True),
    ],
)
def test_reply_reasons_in_its_own_field_or_in_its_text(message, expected):
    assert has_reasoning({"role": "assistant", **message}) is expected


def test_tojson_escapes_no_html():
    assert (
        ChatTemplate("{{ messages[0].content | tojson }}", {}).render([{"role": "user", "content": "<é>"}], generate=True)
        == '"<é>"'
    )


def test_text_parts_are_joined_by_lines():
    assert flatten([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    assert flatten(None) == ""


def reply(content="x", **more):
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (reply(None), reply("")),
        (reply(" x\n"), reply("x")),
        (reply(), reply(name="planner")),
        (reply(), reply(reasoning_content="First, …")),
        (reply([{"type": "text", "text": "x"}]), reply("x")),
        (reply(tool_calls=[CALL]), reply(tool_calls=[CALL | {"id": "other"}])),
        (
            reply(tool_calls=[CALL]),
            reply(tool_calls=[CALL | {"function": {"name": "multiply", "arguments": '{"b":"\\u00e9","a":6}'}}]),
        ),
        (reply(tool_calls=[]), reply()),
    ],
)
def test_messages_that_mean_the_same_have_one_digest(one, other):
    assert message_digest(one) == message_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (reply("x"), reply("y")),
        (reply("x"), {"role": "user", "content": "x"}),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x "}),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "ann"}),
        (reply(tool_calls=[CALL]), reply()),
        (reply(tool_calls=[CALL]), reply(tool_calls=[CALL, CALL])),
        (reply(tool_calls=[CALL]), reply(tool_calls=[CALL | {"function": {"name": "multiply", "arguments": '{"a": 7}'}}])),
    ],
)
def test_messages_that_differ_have_two(one, other):
    assert message_digest(one) != message_digest(other)


def test_chains_depend_on_order_and_on_tools():
    a, b = message_digest(reply("a")), message_digest(reply("b"))
    assert chain_digest(chain_digest("", a), b) != chain_digest(chain_digest("", b), a)
    assert tools_digest(TOOLS) != tools_digest(())


@pytest.mark.parametrize("arguments", ["{not json", "[" * 100_000, "9" * 10_000, {"a": float("nan")}])
def test_arguments_that_are_no_json_have_a_canonical_form_too(arguments):
    assert canonical_json(arguments)


@pytest.mark.parametrize(("sent", "back"), [('{"a": 6.0}', '{"a":6}'), ('{"a": [9007199254740993]}', '{"a":[9007199254740992]}')])
def test_numbers_that_javascript_writes_otherwise_are_the_same_call(sent, back):
    assert canonical_json(sent) == canonical_json(back)
    assert canonical_json('{"a": 1}') != canonical_json('{"a": true}')


SEEN = {"type": "picture", "digest": "ab", "media_type": "image/png"}
PICTURED = [{"role": "user", "content": [{"type": "text", "text": "See"}, SEEN]}]
LISTS_ONLY = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)


def test_picture_is_part_for_template_and_digest_for_path():
    template = ChatTemplate("{% for part in messages[0].content %}{{ part.type }} {% endfor %}", {})
    assert template.render(PICTURED, generate=True) == "text image "
    other = [{**PICTURED[0], "content": [PICTURED[0]["content"][0], {**SEEN, "digest": "cd"}]}]
    assert message_digest(PICTURED[0]) != message_digest(other[0])


def test_template_that_needs_parts_gets_text_as_a_part():
    template = ChatTemplate(LISTS_ONLY, {})
    talk = [{"role": "system", "content": "Be brief."}, *PICTURED, {"role": "assistant", "content": "Red."}]
    assert template.render(talk, generate=True) == "system:Be brief.;user:See<image>;assistant:Red.;"
