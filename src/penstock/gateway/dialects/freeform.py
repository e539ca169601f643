"""Freeform tools, whose input is plain text: the model sees functions with one text, the client its own form."""

import json
import re
from typing import Any

FREEFORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a freeform tool as the model sees it: models not trained on such tools write JSON arguments anyway."""


def freeform_function(tool: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The function that the model sees. `shape` is the grammar of the input, if there is one: it is told, not enforced."""
    parts = [tool.get("description") or ""]
    if shape:
        parts.append(f"The input follows this {shape.get('syntax')} grammar:\n{shape.get('definition')}")
    text = "\n\n".join(part for part in parts if part)
    return {"name": tool["name"], **({"description": text} if text else {}), "parameters": FREEFORM}


def freeform_arguments(text: str) -> str:
    """Return the JSON arguments of a freeform call, as the model would have written them."""
    return json.dumps({"input": text}, ensure_ascii=False)


def freeform_text(arguments: str) -> str:
    """Return the input of a freeform call that the model wrote as JSON arguments."""
    reader = FreeformReader()
    return reader.push(arguments) + reader.finish()


class FreeformReader:
    """Extracts the value of `input` from JSON arguments as they stream in. Arguments of any other form are the input themselves.

    The output does not depend on how the arguments are split: an incomplete escape sequence is held back.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def push(self, text: str) -> str:
        """Add `text`; return the input that is now certain."""
        self._held += text
        if self._state == "before":
            self._find_value()
        if self._state == "inside":
            return self._read_value()
        ready, self._held = ("", self._held) if self._state == "before" else (self._held, "")
        return ready if self._state == "other" else ""

    def finish(self) -> str:
        """Return what was held back: empty unless the arguments ended before their form was known."""
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
"""Plain characters or one escape sequence; a high surrogate is matched together with the escape after it."""


def _is_half(unit: re.Match[str]) -> bool:
    """Return whether `unit` is a high surrogate whose other half may still come."""
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
