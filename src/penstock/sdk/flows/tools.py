"""Tools of a flow: calls found in the model's text, run, and their results told; what goes wrong is told to the model too."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast, get_type_hints

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
OPENING = "<tool_call>"
Tools = Mapping[str, Callable[..., Any]]
"""Functions by name, with or without `async`."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


async def execute(text: str, tools: Tools) -> str:
    """The results of all calls in `text`, one after another, a line break between them."""
    results = [await _run(call, tools) for call in CALL.findall(text)]
    return "\n".join(results) or f"error: no tool call; write {OPENING}{{…}}</tool_call>"


def schemas(tools: Tools) -> list[dict[str, Any]]:
    """The tools as a chat template takes them: a function's docstring describes it, its annotations its arguments."""
    return [{"type": "function", "function": _schema(name, tool)} for name, tool in tools.items()]


async def _run(call: str, tools: Tools) -> str:
    try:
        asked: Any = json.loads(call)
        name, arguments = asked["name"], asked.get("arguments", asked.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 'error: not a tool call; write {"name": "…", "arguments": {…}} as JSON'
    if not isinstance(name, str) or name not in tools:
        return f"error: there is no tool {name!r}; the tools are: {', '.join(tools) or 'none'}"
    if not isinstance(arguments, dict):
        return f"error: the arguments of {name} are not a JSON object"
    try:
        return _told(await _called(tools[name], cast("dict[str, Any]", arguments)))
    except Exception as error:  # a tool fails on what the model asked for; the model is told, and may ask again
        return f"error: {name}: {type(error).__name__}: {error}"


async def _called(tool: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    result = await asyncio.to_thread(tool, **arguments)
    return await result if inspect.isawaitable(result) else result


def _told(result: Any) -> str:
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
