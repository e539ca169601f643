"""White space in JSON that a grammar binds."""

import pytest

pytest.importorskip("llguidance")

from llguidance import LLMatcher, LLTokenizer

from penstock.chat.grammars import GrammarWriter
from penstock.chat.parsers.hermes import Hermes
from penstock.records import ReplyFormat

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = GrammarWriter(Hermes(), None, ()).reply(ReplyFormat(schema=SCHEMA), (), frozenset(), thinking=False)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"a":1,"b":[2,3]}', True),
        ('{"a": 1, "b": [2, 3]}', True),
        ('{"a": 1,\n  "b": [2,\n    3]}', True),
        ('{"a": 1,\n\n"b": [2, 3]}', False),
        ('{"a":  1, "b": [2, 3]}', False),
        ('{\n "a": 1, "b": [2, 3]}', False),
    ],
)
def test_white_space_follows_commas_and_colons_and_is_bounded(text: str, allowed: bool):
    tokenizer = LLTokenizer("byte")
    ids = tokenizer.tokenize_str(text)
    assert (LLMatcher(tokenizer, GRAMMAR.lark).try_consume_tokens(ids) == len(ids)) == allowed


def test_no_option_is_used_that_releases_of_llguidance_read_differently():
    """Before 1.8 a `whitespace_pattern` may repeat. vLLM 0.32 has 1.7, and the trainer must replay what the server allowed."""
    assert "whitespace_pattern" not in GRAMMAR.lark and '"whitespace_flexible": false' in GRAMMAR.lark
