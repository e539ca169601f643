"""Hermes and Qwen tool calls: a JSON object inside `<tool_call>` tags.

Models whose template has no tools get them in this format too.
"""

import json
from collections.abc import Sequence
from typing import Any

from penstock.chat.media import joined
from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, read_call
from penstock.chat.templates import Tool, flatten, json_value
from penstock.records import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OTHERS = ("<function=", "<arg_key>")
"""What other formats write inside the same tags."""

SYSTEM = """You can call functions to help with the request. Their JSON schemas are inside <tools></tools>:
<tools>
{schemas}
</tools>

To call a function, write its name and arguments as a JSON object inside <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments object>}}
</tool_call>
Write one <tool_call> for each call. The results come back inside <tool_response></tool_response>; use them in your answer."""


class Hermes(BaseToolFormat):
    special: tuple[str, ...] = (OPEN, CLOSE)
    opener: str = OPEN
    end: tuple[str, ...] | None = ("}", CLOSE)
    repeats: bool = True

    def matches(self, template: str) -> bool:
        return OPEN in template and not any(other in template for other in OTHERS)

    def offer(self, messages: Sequence[Message], tools: Sequence[Tool], *, system: bool = True) -> list[Message]:
        """The conversation with the tools described in its system text, after the caller's own.

        Without `system`, for templates that refuse that role, both are put before the text of the first message.
        """
        plain = self.flatten(messages)
        if not tools:
            return plain
        texts = [SYSTEM.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))]
        if plain and plain[0]["role"] == "system":
            texts.insert(0, flatten(plain.pop(0).get("content")))
        if system or not plain:
            return [{"role": "system", "content": _joined(texts)}, *plain]
        head = _joined(texts)
        first = plain[0].get("content")
        return [{**plain[0], "content": joined(f"{head}\n\n", first) if first else head}, *plain[1:]]

    def flatten(self, messages: Sequence[Message]) -> list[Message]:
        """Calls become the text that the model would write; consecutive results become one user turn."""
        plain: list[Message] = []
        in_results = False
        for message in messages:
            if message["role"] == "tool":
                shown = joined("<tool_response>\n", message.get("content"), "\n</tool_response>")
                if in_results:
                    plain[-1]["content"] = joined(plain[-1]["content"], "\n", shown)
                else:
                    plain.append({"role": "user", "content": shown})
            else:
                plain.append(_calls_as_text(message))
            in_results = message["role"] == "tool"
        return plain

    def begin(self, name: str) -> str:
        return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":' if name else f'{OPEN}\n{{"name": "'

    def parser(self, options: ParseOptions) -> "HermesParser":
        return HermesParser(options)


class HermesParser(CallParser):
    """A call at the very end of a reply may lack its closing tag, which may have been a stop string."""

    opens: tuple[str, ...] = (OPEN,)

    def calls(self, opener: str) -> Read[bool]:
        return self.attempt(self._call)

    def _call(self, call: PartialCall) -> Read[bool]:
        whole = yield from read_call(self.source, call)
        closed = yield from self.source.token(CLOSE)
        return whole and (closed or self.source.at_end)


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def _calls_as_text(message: Message) -> Message:
    """The message with its calls as text."""
    if not message.get("tool_calls"):
        return message
    calls = [_call_text(call["function"]) for call in message["tool_calls"]]
    text = flatten(message.get("content"))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*([text] if text else []), *calls])}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": json_value(function["arguments"])}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
