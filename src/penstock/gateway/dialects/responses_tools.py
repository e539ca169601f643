"""The tools of a Responses request: as functions for the model, and back under the names and kinds that the client knows."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.chat.templates import Tool
from penstock.gateway.dialects import fields

FREEFORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""A freeform tool's parameters: models that were not trained on such tools write JSON arguments all the same."""


class Address(NamedTuple):
    """How the client knows a tool that the model knows by one flat name."""

    name: str
    namespace: str | None
    is_custom: bool


class _Given(NamedTuple):
    tool: dict[str, Any]
    namespace: str | None
    where: str
    """Its place in the request, for messages."""


def offered(value: Any, name: str = "tools") -> tuple[Tool, ...]:
    """What the model is offered: functions, freeform tools as functions, and those of namespaces under joined names."""
    fields.check_depth(value, name)
    known: dict[str, Address] = {}
    tools: list[Tool] = []
    for given in _given(value, name):
        if given.tool["type"] not in ("function", "custom"):
            continue
        flat, address = _address(given)
        if known.setdefault(flat, address) != address:
            raise fields.wrong(given.where, f"is offered to the model as {flat!r}, as is another tool; rename one of them")
        tools.append(_as_function(given, flat))
    return tuple(tools)


def unmet(value: Any) -> Iterator[str]:
    """What the tools ask for and nobody here does: tools that a vendor's servers run, and constrained arguments."""
    for tool, *_ in _given(value, "tools"):
        kind = tool["type"]
        if kind not in ("function", "custom"):
            yield f"tool:{kind}"
        elif tool.get("strict"):
            yield "tools.strict"
        elif (fields.entry(tool.get("format")) or {}).get("type") == "grammar":
            yield "tools.format"


def addresses(value: Any) -> dict[str, Address]:
    """The client's name for each of `offered`."""
    return dict(_address(given) for given in _given(value, "tools") if given.tool["type"] in ("function", "custom"))


def joined(name: str, namespace: str | None) -> str:
    """The flat name of a tool in a namespace.

    >>> joined("close", "agents")
    'agents__close'
    """
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def freeform_arguments(text: str) -> str:
    """The JSON arguments of a freeform call, as the model would have written them."""
    return json.dumps({"input": text}, ensure_ascii=False)


def freeform_text(arguments: str) -> str:
    """The input of a freeform call that the model wrote as JSON arguments."""
    reader = FreeformReader()
    return reader.push(arguments) + reader.finish()


class FreeformReader:
    """The value of `input` in JSON arguments, as they come; arguments of any other form are the input themselves.

    However the arguments are cut, what it gives out adds up to the same: an escape sequence waits until it is whole.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def push(self, text: str) -> str:
        """What is certain with this."""
        self._held += text
        if self._state == "before":
            self._find_value()
        if self._state == "inside":
            return self._read_value()
        ready, self._held = ("", self._held) if self._state == "before" else (self._held, "")
        return ready if self._state == "other" else ""

    def finish(self) -> str:
        """What was held back: nothing, unless the arguments ended before their form was known."""
        return self._held if self._state == "before" else ""

    def _find_value(self) -> None:
        found = _OPENING.match(self._held)
        if found:
            self._held, self._state = self._held[found.end() :], "inside"
        elif not '{"input":"'.startswith("".join(self._held.split())):
            self._state = "other"

    def _read_value(self) -> str:
        parts: list[str] = []
        place = 0
        while (unit := _UNIT.match(self._held, place)) and not _is_half(unit):
            parts.append(_spelt(unit.group()))
            place = unit.end()
        self._held = self._held[place:]
        if self._held.startswith('"'):
            self._held, self._state = "", "after"
        return "".join(parts)


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_UNIT = re.compile(r'[^"\\]+|\\u[dD][89abAB]..\\u.{4}|\\u.{4}|\\[^u]', re.DOTALL)
"""Plain characters, or one escape sequence; two where the first is half of a character."""


def _is_half(unit: re.Match[str]) -> bool:
    """Whether more of the text may make this escape sequence one with the next."""
    is_first = len(unit.group()) == 6 and re.match(r"\\u[dD][89abAB]", unit.group()) is not None
    return is_first and r"\u".startswith(unit.string[unit.end() : unit.end() + 2])


def _spelt(unit: str) -> str:
    if not unit.startswith("\\"):
        return unit
    try:
        text: str = json.loads(f'"{unit}"')
    except ValueError:
        return unit
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _given(value: Any, name: str) -> Iterator[_Given]:
    """Every tool, those inside namespaces too."""
    for place, tool in enumerate(_listed([] if value is None else value, name)):
        where = f"{name}[{place}]"
        if tool["type"] != "namespace":
            yield _Given(tool, None, where)
            continue
        namespace = fields.text(tool.get("name"), f"{where}.name")
        for inner, each in enumerate(_listed(tool.get("tools"), f"{where}.tools")):
            yield _Given(each, namespace, f"{where}.tools[{inner}]")


def _listed(value: Any, name: str) -> list[dict[str, Any]]:
    listed = fields.entries(value)
    if listed is None:
        raise fields.wrong(name, "must be a list of tools")
    tools = [fields.entry(each) or {} for each in listed]
    for place, tool in enumerate(tools):
        fields.text(tool.get("type"), f"{name}[{place}].type")
    return tools


def _address(given: _Given) -> tuple[str, Address]:
    if fields.entry(given.tool.get("function")):
        raise fields.wrong(given.where, "has its name inside `function`, as chat tools do; here `name` stands beside `type`")
    name = fields.text(given.tool.get("name"), f"{given.where}.name")
    return joined(name, given.namespace), Address(name, given.namespace, given.tool["type"] == "custom")


def _as_function(given: _Given, flat: str) -> Tool:
    tool, function = given.tool, dict[str, Any](name=flat)
    description = fields.text(tool.get("description") or "", f"{given.where}.description")
    parameters = tool.get("parameters")
    if tool["type"] == "custom":
        parameters, shape = FREEFORM, fields.entry(tool.get("format")) or {}
        if shape.get("type") == "grammar":
            definition = f"The input follows this {shape.get('syntax')} grammar:\n{shape.get('definition')}"
            description = f"{description}\n\n{definition}" if description else definition
    if description:
        function["description"] = description
    if parameters is not None and fields.entry(parameters) is None:
        raise fields.wrong(f"{given.where}.parameters", f"must be a JSON schema, not {fields.shown(parameters)}")
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
