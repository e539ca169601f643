"""Tool calls of Qwen3-Coder and Qwen3.5: `<function=…>` with one `<parameter=…>` for each argument, as text and not as JSON."""

import json
import re
from typing import Any

import orjson

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, ReplyParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[^>\n]*")
KINDS: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
"""The JSON types that a value is of."""
WORDS = {"True": "true", "False": "false", "None": "null"}


class QwenXml(BaseToolFormat):
    special: tuple[str, ...] = (OPEN, CLOSE)

    def matches(self, template: str) -> bool:
        """Whether the template speaks of both tags."""
        return FUNCTION in template and PARAMETER in template

    def begin(self, name: str) -> str:
        """Up to where the arguments, or the name, come."""
        return f"{OPEN}\n{FUNCTION}{name}" + (">\n" if name else "")

    def parser(self, reading: ParseOptions) -> ReplyParser:
        return QwenXmlParser(reading)


class QwenXmlParser(CallParser):
    """Texts are given out while they are written; other arguments one by one. The outer tag is often forgotten."""

    opens: tuple[str, ...] = (OPEN, FUNCTION)

    def __init__(self, reading: ParseOptions) -> None:
        self._schemas = {tool["function"]["name"]: _properties(tool["function"]) for tool in reading.tools}
        super().__init__(reading)

    def calls(self, opener: str) -> Read[bool]:
        """One call after each tag."""
        if opener == OPEN and not (yield from self.source.token(FUNCTION)):
            self.source.rewind()
            return False
        return (yield from self.attempt(self._call))

    def _call(self, draft: PartialCall) -> Read[bool]:
        source = self.source
        name = yield from source.run(NAME)
        if not name or not (yield from source.token(">")):
            return False
        draft.named(name)
        opening = "{"
        while (yield from source.token(PARAMETER)):
            key = yield from source.run(NAME)
            if not (yield from source.token(">")):
                return False
            draft.grow(f"{opening}{_quoted(key)}: ")
            kinds = _kinds(self._schemas.get(name, {}).get(key))
            if not (yield from self._value(draft, kinds)):
                return False
            opening = ", "
        if not (yield from source.token(FUNCTION_END)):
            return False
        draft.grow("{}" if opening == "{" else "}")
        yield from source.token(CLOSE)
        return True

    def _value(self, draft: PartialCall, kinds: frozenset[str]) -> Read[bool]:
        """Read one value, less the newline at either end."""
        yield from self.source.token("\n", after_spaces=False)
        if kinds == frozenset({"string"}):
            return (yield from self._text(draft))
        parts: list[str] = []
        ended = yield from self.source.until(PARAMETER_END, parts.append, trim=_trim_newline)
        if ended:
            draft.grow(_as_json("".join(parts), kinds))
        return ended

    def _text(self, draft: PartialCall) -> Read[bool]:
        def give(text: str) -> None:
            draft.grow(_quoted(text)[1:-1])

        draft.grow('"')
        ended = yield from self.source.until(PARAMETER_END, give, trim=_trim_newline)
        if ended:
            draft.grow('"')
        return ended


def _trim_newline(text: str) -> str:
    return text.removesuffix("\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """The value that `text` is by its schema: JSON where that is of a kind that fits, and a text otherwise."""
    written = WORDS.get(text.strip(), text.strip())
    try:
        kind = KINDS[type(orjson.loads(written))]
    except ValueError:
        return _quoted(text)
    return written if not kinds or kinds & kind else _quoted(text)


def _properties(function: dict[str, Any]) -> dict[str, Any]:
    parameters: Any = function.get("parameters")
    properties: Any = parameters.get("properties") if isinstance(parameters, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return properties if isinstance(properties, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _kinds(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    plain: dict[str, Any] = schema  # pyright: ignore[reportUnknownVariableType]
    stated: Any = plain.get("type")
    kinds = {stated} if isinstance(stated, str) else {kind for kind in stated or () if isinstance(kind, str)}
    return frozenset(kinds).union(*(_kinds(choice) for key in ("anyOf", "oneOf") for choice in plain.get(key) or ()))
