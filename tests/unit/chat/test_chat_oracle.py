"""Well-formed replies are read as transformers' own parser reads them; it needs a template per model, and refuses the rest."""

import json

from hypothesis import given
from hypothesis import strategies as st
from reply_cases import cut_at, parse

from penstock.chat.parsers.base import ParseOptions, ReasoningTags
from penstock.chat.parsers.hermes import Hermes
from penstock.chat.parsers.qwen_xml import QwenXml

THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
FIELDS = {
    "json": {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": "{content}",
    },
    "xml": {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"},
        "transform": {"name": "{name}", "arguments": "{content}"},
    },
}
WORDS = st.text('ab{}"\\<>/é🙂 ', max_size=8).map(str.strip)
VALUES = st.one_of(WORDS, st.integers(), st.none(), st.lists(WORDS, max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "é"]), VALUES, max_size=2)
REPLIES = st.tuples(WORDS, WORDS, st.lists(ARGUMENTS, max_size=3), st.lists(st.integers(0, 500), max_size=6))
STRINGS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {k: {"type": "string"} for k in "aé"}}}}]


def theirs(said, form):
    from transformers.utils.chat_parsing import parse_response  # slow to import: only the process that runs this file should

    fields = {"thinking": THINKING, "calls": FIELDS[form], "content": {"content": "text"}}
    read = parse_response(said, {"start_anchor": "<|im_start|>assistant\n", "fields": fields}, prefix="")
    calls = [(call["name"], call["arguments"]) for call in read.get("calls", ())]
    return read.get("thinking", ""), read.get("content", ""), calls


def ours(said, cuts, form, tools=()):
    read = parse(form.parser(ParseOptions(True, False, ReasoningTags("<think>", "</think>"), False, tools)), *cut_at(said, cuts))
    return read.reasoning, read.text, [(name, json.loads(arguments)) for name, arguments in read.calls]


def written(thought, text, calls):
    return "\n".join([*([f"<think>\n{thought}\n</think>\n"] if thought else []), *([text] if text else []), *calls])


@given(REPLIES)
def test_calls_in_json_agree(reply):
    thought, text, calls, cuts = reply
    tags = [f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(a, ensure_ascii=False)}}}\n</tool_call>' for a in calls]
    said = written(thought, text, tags)
    assert ours(said, cuts, Hermes()) == theirs(said, "json") == (thought, text, [("f", call) for call in calls])


@given(REPLIES)
def test_calls_in_tags_agree(reply):
    thought, text, calls, cuts = reply
    texts = [{key: str(value) for key, value in call.items()} for call in calls]
    inner = ["".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.items()) for call in texts]
    said = written(thought, text, [f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>" for tags in inner])
    assert ours(said, cuts, QwenXml(), STRINGS) == theirs(said, "xml") == (thought, text, [("f", call) for call in texts])
