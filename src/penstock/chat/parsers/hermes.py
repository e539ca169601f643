"""Tool calls in the Hermes form, which Qwen models share: a JSON object inside `<tool_call>` tags.

It is also the form in which tools are offered to models whose template knows none.
"""

import json
from collections.abc import Sequence
from typing import Any

from penstock.chat.parsers.base import BaseToolFormat, CallParser, ParseOptions, PartialCall, Read, ReplyParser, read_call
from penstock.chat.templates import Tool, flatten, json_value
from penstock.records import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OTHERS = ("<function=", "<arg_key>")
"""What other forms write inside the same tags."""

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

    def matches(self, template: str) -> bool:
        """Whether the template itself speaks of `<tool_call>`, and of nothing but JSON inside it."""
        return OPEN in template and not any(other in template for other in OTHERS)

    def offer(self, messages: Sequence[Message], tools: Sequence[Tool], *, system: bool = True) -> list[Message]:
        """The conversation with the tools described in its system text, after the caller's own.

        Without `system`, for templates that refuse that role, all of it goes before the text of the first message after it.
        """
        plain = self.flatten(messages)
        if not tools:
            return plain
        texts = [SYSTEM.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))]
        if plain and plain[0]["role"] == "system":
            texts.insert(0, flatten(plain.pop(0).get("content")))
        if system or not plain:
            return [{"role": "system", "content": _joined(texts)}, *plain]
        return [{**plain[0], "content": _joined([*texts, flatten(plain[0].get("content"))])}, *plain[1:]]

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

    def begin(self, name: str) -> str:
        """Up to where the arguments, or the name, come."""
        return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":' if name else f'{OPEN}\n{{"name": "'

    def parser(self, reading: ParseOptions) -> ReplyParser:
        return HermesParser(reading)


class HermesParser(CallParser):
    """A call whose closing tag is missing at the reply's very end is one all the same: the tag may have been a stop string."""

    opens: tuple[str, ...] = (OPEN,)

    def calls(self, opener: str) -> Read[bool]:
        """One call in each pair of tags."""
        return self.attempt(self._call)

    def _call(self, draft: PartialCall) -> Read[bool]:
        whole = yield from read_call(self.source, draft)
        closed = yield from self.source.token(CLOSE)
        return whole and (closed or self.source.is_spent)


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def _spoken(message: Message) -> Message:
    """An assistant message with its calls as text, any other as it is."""
    if not message.get("tool_calls"):
        return message
    calls = [_written(call["function"]) for call in message["tool_calls"]]
    text = flatten(message.get("content"))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*([text] if text else []), *calls])}


def _written(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": json_value(function["arguments"])}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
