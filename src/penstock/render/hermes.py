"""Tool calls in the Hermes form, which Qwen models share: a JSON object inside `<tool_call>` tags."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.records import Message
from penstock.render.chat import Tool, flatten, json_value
from penstock.render.tools import Piece, Text, ToolCall, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"

SYSTEM = """You can call functions to help with the request. Their JSON schemas are inside <tools></tools>:
<tools>
{schemas}
</tools>

To call a function, write its name and arguments as a JSON object inside <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments object>}}
</tool_call>
Write one <tool_call> for each call. The results come back inside <tool_response></tool_response>; use them in your answer."""


class Hermes:
    """See `ToolFormat`."""

    def matches(self, template: str) -> bool:
        """Whether the template itself speaks of `<tool_call>`."""
        return OPEN in template

    def offer(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The caller's system text comes first, the tools after it."""
        plain = self.flatten(messages)
        if not tools:
            return plain
        text = SYSTEM.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] == "system":
            own = flatten(plain[0].get("content"))
            return [{"role": "system", "content": f"{own}\n\n{text}" if own else text}, *plain[1:]]
        return [{"role": "system", "content": text}, *plain]

    def flatten(self, messages: Sequence[Message]) -> list[Message]:
        """Calls become the text that the model would have written; results in a row share one user turn."""
        plain: list[Message] = []
        in_results = False
        for message in messages:
            if message["role"] == "tool":
                text = f"<tool_response>\n{flatten(message.get('content'))}\n</tool_response>"
                if in_results:
                    plain[-1]["content"] += "\n" + text
                else:
                    plain.append({"role": "user", "content": text})
            else:
                plain.append(_spoken(message))
            in_results = message["role"] == "tool"
        return plain

    def parser(self) -> ToolParser:
        """A fresh parser."""
        return HermesParser()


class HermesParser:
    """Holds back what may be a call; white space before a call, and after the last one, belongs to nothing."""

    def __init__(self) -> None:
        self._held = ""
        self._gap = ""
        """White space before the open call: dropped if it is one, given out if it turns out to be text."""
        self._inside = False
        self._searched = 0
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        self._held += text
        pieces: list[Piece] = []
        while self._close_call(pieces) if self._inside else self._open_call(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        rest = self._gap + OPEN + self._held if self._inside else self._held
        return [Text(rest)] if rest and not (self._after_call and rest.isspace()) else []

    def _open_call(self, pieces: list[Piece]) -> bool:
        """Give out text up to the next opening tag, or to where one may begin."""
        start = self._held.find(OPEN)
        end = start if start >= 0 else _safe_length(self._held)
        text = self._held[:end].rstrip() if start >= 0 else self._held[:end]
        if text:
            pieces.append(Text(text))
            self._after_call = False
        if start < 0:
            self._held = self._held[end:]
            return False
        self._gap = self._held[len(text) : start]
        self._held, self._inside, self._searched = self._held[start + len(OPEN) :], True, 0
        return True

    def _close_call(self, pieces: list[Piece]) -> bool:
        """Turn what is inside the tags into a call, or back into text if it is none."""
        end = self._held.find(CLOSE, self._searched)
        if end < 0:
            self._searched = max(0, len(self._held) - len(CLOSE) + 1)
            return False
        body = self._held[:end]
        call = _parse(body)
        pieces.append(call or Text(self._gap + OPEN + body + CLOSE))
        self._after_call = call is not None
        self._held, self._inside, self._gap = self._held[end + len(CLOSE) :], False, ""
        return True


def _safe_length(text: str) -> int:
    """How much of `text` cannot be white space before an opening tag, or the beginning of one."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-size:]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())


def _parse(body: str) -> ToolCall | None:
    """The call that `body` is; None where it is not an object with a name and an object of arguments."""
    try:
        call: Any = json.loads(body)
        name, arguments = call["name"], call["arguments"]
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()  # a lone surrogate is no text
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return ToolCall(name, text)


def _spoken(message: Message) -> Message:
    """An assistant message with its calls as text, any other as it is."""
    if not message.get("tool_calls"):
        return message
    calls = [_written(call["function"]) for call in message["tool_calls"]]
    text = flatten(message.get("content"))
    return {"role": message["role"], "content": "\n".join([*([text] if text else []), *calls])}


def _written(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": json_value(function["arguments"])}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
