"""Anthropic content blocks to chat messages: the same conversation gives the same messages, wherever its blocks are cut.

A turn of the user is its tool results, each a message of its own, and then one message with its texts. A turn of the assistant
is one message: thinking, text and calls, which is what was sampled in one go. Turns in a row by the same side are one turn, as
the vendor has it; `cache_control` and other labels of blocks come and go between calls and are not read.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from penstock.chat.templates import flatten
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.messages_input import INVALID_JSON
from penstock.records import Message

UNPARSED = "__unparsedToolInput"
"""The key under which Claude Code sends such arguments back, with their beginning as `raw` and their length as `len`."""
BILLING = "x-anthropic-billing-header:"
"""How a block of `system` begins that speaks to the vendor, not to the model, and may change from call to call."""


class Placed(NamedTuple):
    """A content block and where it stands: in which turn (None: in `system`), and where in it."""

    turn: int | None
    place: int
    value: Any

    @property
    def name(self) -> str:
        """As an error names it."""
        return f"system[{self.place}]" if self.turn is None else f"messages[{self.turn}].content[{self.place}]"


class Unit(NamedTuple):
    """What one message is made of."""

    role: str
    blocks: tuple[Placed, ...]


class Units(NamedTuple):
    """A request's conversation, ready to be read message by message."""

    units: list[Unit]
    ignored: frozenset[str]
    """What of it no message will have."""


def split(system: Any, turns: Sequence[Any]) -> Units:
    """Which blocks go into which message. Nothing inside a block is read yet."""
    ignored: set[str] = set()
    units: list[Unit] = []
    given = [] if system is None else _placed(system, None, "system")
    told = tuple(each for each in given if not _is_billing(each.value))
    if len(told) < len(given):
        ignored.add("system:billing_header")
    if any((fields.entry(each.value) or {}).get("text") != "" for each in told):
        units.append(Unit("system", told))
    side, run = "", list[Placed]()
    for turn, value in enumerate(turns):
        role, blocks = _turn(value, turn)
        if role != side or role == "system":
            units += _units(side, run)
            side, run = role, []
        run += blocks
    units += _units(side, run)
    if any(_kind(block.value) == "redacted_thinking" for unit in units for block in unit.blocks):
        ignored.add("block:redacted_thinking")
    return Units(units, frozenset(ignored))


def read(unit: Unit) -> Message:
    """The message that a unit is; refused by its place where a block is none that the model can take."""
    for block in unit.blocks:
        fields.check_depth(block.value, block.name)
    if unit.role == "assistant":
        return _assistant(unit.blocks)
    if unit.role == "tool":
        return _result(unit.blocks[0])
    return {"role": unit.role, "content": flatten([{"text": _text(each.value, each.name)} for each in unit.blocks])}


def _turn(value: Any, turn: int) -> tuple[str, list[Placed]]:
    given = fields.entry(value)
    if given is None:
        raise fields.wrong(f"messages[{turn}]", "must be an object")
    role = given.get("role")
    if role not in ("user", "assistant", "system"):
        raise fields.wrong(f"messages[{turn}].role", f"must be user, assistant or system, not {fields.shown(role)}")
    return role, _placed(given.get("content"), turn, f"messages[{turn}].content")


def _placed(content: Any, turn: int | None, name: str) -> list[Placed]:
    """Blocks with their places; a plain string is one block of text."""
    if isinstance(content, str):
        return [Placed(turn, 0, {"type": "text", "text": content})]
    blocks = fields.entries(content)
    if blocks is None:
        raise fields.wrong(name, f"must be a string or a list of content blocks, not {fields.shown(content)}")
    return [Placed(turn, place, block) for place, block in enumerate(blocks)]


def _units(role: str, run: list[Placed]) -> Iterable[Unit]:
    """The messages of a turn."""
    if role != "user":
        return [Unit(role, tuple(run))] if role else []
    results = [block for block in run if _kind(block.value) == "tool_result"]
    texts = tuple(block for block in run if _kind(block.value) != "tool_result")
    own = [Unit("user", texts)] if texts or not results else []
    return [*(Unit("tool", (block,)) for block in results), *own]


def _assistant(blocks: Sequence[Placed]) -> Message:
    said: list[str] = []
    thought: list[str] = []
    calls: list[dict[str, Any]] = []
    for placed in blocks:
        kind, block = _kind(placed.value), fields.entry(placed.value) or {}
        if kind == "thinking":
            thought.append(_string(block.get("thinking"), f"{placed.name}.thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, placed.name))
        elif kind != "redacted_thinking":
            said.append(_text(block, placed.name))
    message: Message = {"role": "assistant", "content": "".join(said)}
    if any(thought):
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], name: str) -> dict[str, Any]:
    function = {"name": _string(block.get("name"), f"{name}.name"), "arguments": _arguments(block.get("input", {}))}
    return {"id": _string(block.get("id"), f"{name}.id"), "type": "function", "function": function}


def _arguments(given: Any) -> str:
    """JSON text of a call's input; what was no JSON when it was sampled is that text again."""
    wrapped = fields.entry(given) or {}
    raw = wrapped.get(INVALID_JSON)
    if len(wrapped) == 1 and (cut := fields.entry(wrapped.get(UNPARSED))) is not None:
        raw = cut.get("raw")
        raw = raw if isinstance(raw, str) and len(raw.encode("utf-16-le")) // 2 == cut.get("len") else None
    return raw if isinstance(raw, str) else orjson.dumps(given).decode()


def _result(placed: Placed) -> Message:
    """A tool's result. An error is marked as one, unless its text says so itself."""
    block = fields.entry(placed.value) or {}
    content: Any = block.get("content")
    text = content if isinstance(content, str) else _joined(content, f"{placed.name}.content")
    if fields.flag(block, "is_error") and "error" not in text[:40].lower():
        text = f"Error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": _string(block.get("tool_use_id"), f"{placed.name}.tool_use_id")}


def _joined(content: Any, name: str) -> str:
    parts = fields.entries([] if content is None else content)
    if parts is None:
        raise fields.wrong(name, f"must be a string or a list of text blocks, not {fields.shown(content)}")
    return flatten([{"text": _text(part, f"{name}[{place}]")} for place, part in enumerate(parts)])


def _text(value: Any, name: str) -> str:
    kind = _kind(value)
    if kind != "text":
        raise fields.wrong(name, f"must be a text block here; {fields.shown(kind)} is not supported")
    return _string((fields.entry(value) or {}).get("text"), f"{name}.text")


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise fields.wrong(name, f"must be a string, not {fields.shown(value)}")
    return value


def _kind(value: Any) -> Any:
    return (fields.entry(value) or {}).get("type")


def _is_billing(value: Any) -> bool:
    text = (fields.entry(value) or {}).get("text")
    return isinstance(text, str) and text.startswith(BILLING) and "\n" not in text
