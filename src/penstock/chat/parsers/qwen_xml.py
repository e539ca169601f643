"""Qwen3-Coder and Qwen3.5 tool calls: `<function=…>` with one `<parameter=…>` per argument, as text and not as JSON."""

import json
import re
from typing import Any

import orjson

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read

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
"""The JSON schema types of a Python value."""
WORDS = {"True": "true", "False": "false", "None": "null"}


class QwenXml(BaseToolFormat):
    special: tuple[str, ...] = (OPEN, CLOSE)

    def matches(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def begin(self, name: str) -> str:
        return f"{OPEN}\n{FUNCTION}{name}" + (">\n" if name else "")

    def parser(self, options: ParseOptions) -> "QwenXmlParser":
        return QwenXmlParser(options)


class QwenXmlParser(CallParser):
    """String arguments are emitted as they come, others when they are complete. Models often omit the outer tag."""

    opens: tuple[str, ...] = (OPEN, FUNCTION)

    def __init__(self, options: ParseOptions) -> None:
        self._schemas = {tool["function"]["name"]: _properties(tool["function"]) for tool in options.tools}
        super().__init__(options)

    def calls(self, opener: str) -> Read[bool]:
        if opener == OPEN and not (yield from self.source.token(FUNCTION)):
            self.source.rewind()
            return False
        return (yield from self.attempt(self._call))

    def _call(self, call: PartialCall) -> Read[bool]:
        source = self.source
        name = yield from source.run(NAME)
        if not name or not (yield from source.token(">")):
            return False
        call.set_name(name)
        opening = "{"
        while (yield from source.token(PARAMETER)):
            key = yield from source.run(NAME)
            if not (yield from source.token(">")):
                return False
            call.add_arguments(f"{opening}{_quoted(key)}: ")
            kinds = _kinds(self._schemas.get(name, {}).get(key))
            if not (yield from self._value(call, kinds)):
                return False
            opening = ", "
        if not (yield from source.token(FUNCTION_END)):
            return False
        call.add_arguments("{}" if opening == "{" else "}")
        yield from source.token(CLOSE)
        return True

    def _value(self, call: PartialCall, kinds: frozenset[str]) -> Read[bool]:
        """Read one value, without the newline at either end."""
        yield from self.source.token("\n", after_spaces=False)
        if kinds == frozenset({"string"}):
            return (yield from self._text(call))
        parts: list[str] = []
        ended = yield from self.source.until(PARAMETER_END, parts.append, trim=_trim_newline)
        if ended:
            call.add_arguments(_as_json("".join(parts), kinds))
        return ended

    def _text(self, call: PartialCall) -> Read[bool]:
        def emit(text: str) -> None:
            call.add_arguments(_quoted(text)[1:-1])

        call.add_arguments('"')
        ended = yield from self.source.until(PARAMETER_END, emit, trim=_trim_newline)
        if ended:
            call.add_arguments('"')
        return ended


def _trim_newline(text: str) -> str:
    return text.removesuffix("\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """The value as JSON: parsed if it then has a type that the schema allows, else a string."""
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
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    plain: dict[str, Any] = schema  # pyright: ignore[reportUnknownVariableType]
    stated: Any = plain.get("type")
    kinds = {stated} if isinstance(stated, str) else {kind for kind in stated or () if isinstance(kind, str)}
    return frozenset(kinds).union(*(_kinds(choice) for key in ("anyOf", "oneOf") for choice in plain.get(key) or ()))
