"""Calls in Chat Completions that are none of a function tool: `functions`, which came before tools, and freeform tools."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.gateway.dialects import fields
from penstock.gateway.dialects.freeform import FreeformReader, freeform_text
from penstock.gateway.reply import CallDelta, tool_call
from penstock.records import Message


class CallForms(NamedTuple):
    """What a client reads that is not a call of a function tool."""

    functions: bool = False
    """Whether it sent `functions`: its answer has a `function_call`."""
    freeform: frozenset[str] = frozenset()
    """The names of its freeform tools."""

    def message(self, message: Message) -> Message:
        """A reply with its calls in the client's forms."""
        calls = message.get("tool_calls")
        if not calls or self == CallForms():
            return message
        if self.functions:
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            return {**rest, "function_call": calls[0]["function"]}
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if function["name"] not in self.freeform:
            return call
        return {"id": call["id"], "type": "custom", "custom": _custom(function["name"], freeform_text(function["arguments"]))}


class CallChanges:
    """The calls of one streamed choice as changes of its message."""

    def __init__(self, forms: CallForms) -> None:
        self._forms = forms
        self._readers: dict[int, FreeformReader] = {}
        """By the ordinals of freeform calls."""

    def change(self, delta: CallDelta) -> dict[str, Any]:
        if self._forms.functions:
            named = {"name": delta.name} if delta.begins else {}
            return {"function_call": {**named, "arguments": delta.arguments}}
        if delta.begins and delta.name in self._forms.freeform:
            reader = self._readers[delta.ordinal] = FreeformReader()
            made = {"id": delta.id, "type": "custom", "custom": _custom(delta.name, reader.push(delta.arguments))}
        elif reader := self._readers.get(delta.ordinal):
            made = {"custom": {"input": reader.push(delta.arguments)}}
        else:
            made = tool_call(delta) if delta.begins else {"function": {"arguments": delta.arguments}}
        return {"tool_calls": [{"index": delta.ordinal, **made}]}

    def rest(self) -> Iterator[dict[str, Any]]:
        """Changes with what was held back until the end."""
        for ordinal, reader in self._readers.items():
            if text := reader.finish():
                yield {"tool_calls": [{"index": ordinal, "custom": {"input": text}}]}


def _custom(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "input": text}


def call_forms(body: dict[str, Any]) -> CallForms:
    return CallForms(bool(body.get("functions")), fields.freeform_tools(body.get("tools")))


def functions_as_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The request with `tools` and `tool_choice` for `functions` and `function_call`; of a function one call was made at a time."""
    functions, choice = body.get("functions"), body.get("function_call")
    if not functions:
        return body
    if body.get("tools"):
        raise fields.invalid("functions", "and tools exclude each other; leave one out")
    listed = [fields.as_object(each) or {} for each in fields.as_list(functions) or [None]]
    for place, function in enumerate(listed):
        if not isinstance(function.get("name"), str):
            raise fields.invalid(f"functions[{place}]", "must be a function with a name")
    named = fields.as_object(choice)
    if named is not None and named.get("name") not in [function["name"] for function in listed]:
        raise fields.invalid("function_call", f"must be 'auto', 'none' or one of the functions given, not {fields.preview(choice)}")
    tools = [{"type": "function", "function": function} for function in listed]
    wanted = choice if named is None else {"type": "function", "function": named}
    return {**body, "tools": tools, "tool_choice": wanted, "parallel_tool_calls": False}
