"""Grammars of replies: JSON of a schema, and tool calls as a model writes them, in the Lark form of llguidance."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

from penstock.chat.parsers.base import ReasoningTags, ToolFormat
from penstock.chat.templates import Tool
from penstock.records import ReplyFormat, ReplyGrammar

ANY_OBJECT: dict[str, Any] = {"type": "object"}
WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Bounded: with more freedom, weak models write white space without end."""
SPACING = {"whitespace_flexible": False, "item_separator": f",{WHITESPACE}", "key_separator": ":( )?"}
"""White space of JSON, after commas and colons only. Every llguidance since 1.3 reads this alike, so that the trainer replays what
a vLLM server allowed; a `whitespace_pattern` may repeat before 1.8."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"})
"""Formats of strings that are enforced; any other one is an annotation, as the standard has it."""
SCHEMA_LISTS, SCHEMA_MAPS = ("anyOf", "oneOf", "allOf", "prefixItems"), ("properties", "$defs", "definitions", "patternProperties")
SCHEMAS = ("items", "additionalProperties")


class GrammarWriter:
    """Writes grammars for one model. `added` are the tokens that its tokenizer reads before all others, by their text."""

    def __init__(self, form: ToolFormat, tags: ReasoningTags | None, added: Iterable[tuple[str, int]]) -> None:
        self._form, self._tags = form, tags
        self._added = dict(added)
        texts = sorted(self._added, key=len, reverse=True)
        self._split = re.compile("(" + ("|".join(map(re.escape, texts)) or "(?!)") + ")")

    @property
    def constrains_calls(self) -> bool:
        """Whether the arguments of calls can be constrained: the model writes them as JSON."""
        return self._form.end is not None

    def reply(self, form: ReplyFormat, tools: Sequence[Tool], strict: frozenset[str], *, thinking: bool) -> ReplyGrammar:
        """A reply that is JSON of a schema or, if tools are offered, a call."""
        schema = _checked(form.schema)
        answers = [self._literals(self._form.answer_prefix) + " value"]
        rules = [f"value: {_json(schema)}", f"WS: /{WHITESPACE}/"]
        if tools and self.constrains_calls:
            answers.append("calls")
            rules += self._calls(tools, strict)
        plain = len(answers) == 1 and self._tags is None and not self._form.answer_prefix
        lark = "\n".join([self._start(" | ".join(answers), thinking=thinking), *rules])
        return ReplyGrammar(lark=lark, schema=json.dumps(schema) if plain else "")

    def forced_call(self, name: str, tools: Sequence[Tool], strict: frozenset[str]) -> ReplyGrammar:
        """The rest of a reply whose prompt ends with `ToolFormat.begin(name)`. Without a name, further calls may follow."""
        begun = self._form.begin(name) or ""
        chosen = [tool for tool in tools if not name or tool["function"]["name"] == name]
        more = " (WS calls)?" if self._form.repeats and not name else ""
        rules = [f"start: rest{more}", *self._rest(chosen, strict, begun=begun, rule="rest"), f"WS: /{WHITESPACE}/"]
        return ReplyGrammar(lark="\n".join([*rules, *(self._calls(tools, strict) if more else ())]))

    def free_text(self, tools: Sequence[Tool], strict: frozenset[str], *, thinking: bool) -> ReplyGrammar | None:
        """Text in which calls of `strict` tools follow their schemas; None if this format has no opener for calls."""
        opener = self._form.opener
        if not opener:
            return None
        rules = [
            self._until("head", opener),
            "TEXT: /(.|\\n)*/",
            f"WS: /{WHITESPACE}/",
            *self._rest(tools, strict, begun=opener, rule="rest"),
        ]
        return ReplyGrammar(lark="\n".join([self._start("(head rest)* TEXT", thinking=thinking, text=False), *rules]))

    def _calls(self, tools: Sequence[Tool], strict: frozenset[str]) -> list[str]:
        more = "(WS call)*" if self._form.repeats else ""
        return [f"calls: call {more}", *self._rest(tools, strict, begun="", rule="call")]

    def _rest(self, tools: Sequence[Tool], strict: frozenset[str], *, begun: str, rule: str) -> list[str]:
        """The rule of a call of one of these tools, of which `begun` is written already."""
        end = " ".join(f"WS {self._literals(part)}" for part in self._form.end or ())
        rules: list[str] = []
        for place, tool in enumerate(tools):
            function = tool["function"]
            begin = (self._form.begin(function["name"]) or "").removeprefix(begun)
            schema = _checked(function.get("parameters") or ANY_OBJECT) if function["name"] in strict else ANY_OBJECT
            rules.append(f"{rule}_{place}: {self._literals(begin)} WS {_json(schema)} {end}")
        return [f"{rule}: " + " | ".join(f"{rule}_{place}" for place in range(len(tools))), *rules]

    def _start(self, body: str, *, thinking: bool, text: bool = True) -> str:
        """The first rules. A model that reasons may do so first; `thinking`: the prompt has begun it."""
        if self._tags is None:
            return f"start: {body}"
        before = "thought" if thinking else f"({self._literals(self._tags.opening)} thought)?"
        lines = [f"start: {before} WS body", f"body: {body}", self._until("thought", self._tags.closing)]
        return "\n".join([*lines, "TEXT: /(.|\\n)*/"] if text else lines)

    def _until(self, rule: str, marker: str) -> str:
        """The rule of text up to a marker. Text never holds an added token; other markers end it where they first appear."""
        if marker in self._added:
            return f"{rule}: TEXT <[{self._added[marker]}]>"
        return f"{rule}[lazy]: TEXT {json.dumps(marker)}"

    def _literals(self, text: str) -> str:
        """Text as items of a rule: an added token is itself, not its text."""
        parts = [part for part in self._split.split(text) if part]
        return " ".join(f"<[{self._added[part]}]>" if part in self._added else json.dumps(part) for part in parts)


def grammar_problem(lark: str) -> str:
    """Why a grammar cannot be compiled, in a line; empty if it can, or if llguidance is not installed here."""
    try:
        return _problem(lark)
    except ImportError:
        return ""


def schema_problem(schema: dict[str, Any]) -> str:
    """As `grammar_problem`, of JSON of this schema alone."""
    return grammar_problem(f"start: {_json(_checked(schema))}")


@lru_cache(256)
def _problem(lark: str) -> str:
    from llguidance import LLMatcher  # of the `local` extra

    validate = cast("Callable[[str], str]", LLMatcher.validate_grammar)
    text = re.split(r"\n *\d+ \|", validate(lark))[0]  # an excerpt of the grammar follows
    return " ".join(re.sub(r"^at \d+\(\d+\): ", "", text).removeprefix("failed to compile JSON schema: ").split())


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": SPACING})


def _checked(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema without formats that are not enforced."""
    return ANY_OBJECT if schema is None else cast("dict[str, Any]", _without_formats(schema))


def _without_formats(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    plain = cast("dict[str, Any]", schema)
    kept: dict[str, Any] = {}
    for key, value in plain.items():
        if key in SCHEMA_LISTS and isinstance(value, list):
            kept[key] = [_without_formats(each) for each in cast("list[Any]", value)]
        elif key in SCHEMA_MAPS and isinstance(value, dict):
            kept[key] = {name: _without_formats(each) for name, each in cast("dict[str, Any]", value).items()}
        elif key in SCHEMAS:
            kept[key] = _without_formats(value)
        elif key != "format" or value in FORMATS:
            kept[key] = value
    return kept
