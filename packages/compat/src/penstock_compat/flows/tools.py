"""The tokenizer and the tool calls of flows."""

import asyncio
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints

from penstock.errors import ConfigError
from penstock.records import Message


def load_tokenizer(source: Any) -> Any:
    """Loads a tokenizer from the model folder that `source` names, once per process; anything but a path is returned as it is."""
    return _load(Path(source)) if isinstance(source, str | Path) else source


def render_messages(tokenizer: Any, messages: list[Message], options: Mapping[str, Any], *, reply: bool = True) -> list[int]:
    """Returns the token ids of messages, ready for a reply."""
    if tokenizer is None:
        raise ConfigError("this flow has no tokenizer; give AgentFlowBase(tokenizer=…), or call gateway_generate with messages")
    known = {name: value for name, value in options.items() if value is not None}
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=reply, tokenize=True, **{"return_dict": False, **known})
    return cast("list[int]", ids["input_ids"] if isinstance(ids, Mapping) else ids)


def template_preamble(tokenizer: Any, options: Mapping[str, Any]) -> list[int]:
    """Returns what the template puts before the first message: the tokens that one message has and a second one does not add."""
    message: Message = {"role": "user", "content": "."}
    one, two = (render_messages(tokenizer, [message] * count, options, reply=False) for count in (1, 2))
    return one[: max(0, 2 * len(one) - len(two))]


@cache
def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise ConfigError(f"self.tokenizer: {folder} is not on this machine; share the model's folder, or send messages instead")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as cause:
        raise ConfigError("self.tokenizer needs the `transformers` package: pip install transformers") from cause
    return transformers.AutoTokenizer.from_pretrained(folder)


TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
TOOL_CALL_OPENING = "<tool_call>"
Tools = Mapping[str, Callable[..., Any]]
"""Functions by name, with or without `async`."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


async def run_tool_calls(text: str, tools: Tools) -> str:
    """Runs all calls in `text`, one after another; returns their results, one per line."""
    results = [await _run(call, tools) for call in TOOL_CALL.findall(text)]
    return "\n".join(results) or f"error: no tool call; write {TOOL_CALL_OPENING}{{…}}</tool_call>"


def tool_schemas(tools: Tools) -> list[dict[str, Any]]:
    """Returns the tools' schemas for a chat template, from the functions' docstrings and annotations."""
    return [{"type": "function", "function": _schema(name, tool)} for name, tool in tools.items()]


async def _run(call: str, tools: Tools) -> str:
    try:
        fields: Any = json.loads(call)
        name, arguments = fields["name"], fields.get("arguments", fields.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 'error: not a tool call; write {"name": "…", "arguments": {…}} as JSON'
    if not isinstance(name, str) or name not in tools:
        return f"error: there is no tool {name!r}; the tools are: {', '.join(tools) or 'none'}"
    if not isinstance(arguments, dict):
        return f"error: the arguments of {name} are not a JSON object"
    try:
        return _result_text(await _call(tools[name], cast("dict[str, Any]", arguments)))
    except Exception as error:  # the model reads the error and may correct its call
        return f"error: {name}: {type(error).__name__}: {error}"


async def _call(tool: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    result = await asyncio.to_thread(tool, **arguments)
    return await result if inspect.isawaitable(result) else result


def _result_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    signature, hints = inspect.signature(tool), get_type_hints(tool)
    named = [each for each in signature.parameters.values() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    kinds = {each.name: _TYPES.get(hints.get(each.name, str), "string") for each in named}
    return {
        "name": name,
        "description": inspect.getdoc(tool) or name,
        "parameters": {
            "type": "object",
            "properties": {each: {"type": kind} for each, kind in kinds.items()},
            "required": [each.name for each in named if each.default is each.empty],
        },
    }
