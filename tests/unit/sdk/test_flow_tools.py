"""Tools of a flow: what the model's text asks for is run, and whatever goes wrong is reported to it as text."""

import asyncio
import json
from types import MappingProxyType

import pytest

from penstock_compat.flow import MultiStepAgentFlow
from penstock_compat.flows.tools import run_tool_calls, tool_schemas


def multiply(a: int, b: int = 2) -> int:
    """Multiply two integers."""
    return a * b


async def look_up(word: str):
    return {"word": word}


def broken():
    raise KeyError("no such page")


TOOLS = {"multiply": multiply, "look_up": look_up, "broken": broken}


def run(text, tools=TOOLS):
    return asyncio.run(run_tool_calls(text, tools))


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_call_in_text_is_run_and_its_result_reported():
    assert run(f"Let me see. {call('multiply', {'a': 6, 'b': 7})}") == "42"


def test_several_calls_give_line_each_and_async_tools_are_awaited():
    assert run(call("multiply", {"a": 1}) + call("look_up", {"word": "ü"})) == '2\n{"word": "\\u00fc"}'


def test_arguments_may_come_as_json_text_or_as_parameters():
    assert run('<tool_call>{"name": "multiply", "arguments": "{\\"a\\": 3}"}</tool_call>') == "6"
    assert run('<tool_call>{"name": "multiply", "parameters": {"a": 4}}</tool_call>') == "8"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (call("divide", {}), "no tool 'divide'; the tools are: multiply, look_up, broken"),
        (call("broken", {}), "broken: KeyError: 'no such page'"),
        (call("multiply", {"c": 1}), "multiply: TypeError"),
        (call("multiply", [1, 2]), "not a JSON object"),
        ("<tool_call>{not json}</tool_call>", "not a tool call"),
        ("<tool_call>[1]</tool_call>", "not a tool call"),
        ('<tool_call>{"name": "mult', "not a tool call"),
        ('<tool_call>{"name": ["x"]}</tool_call>', "no tool ['x']"),
        ("no call at all", "no tool call"),
    ],
)
def test_call_that_cannot_be_run_is_reported_as_error(text, words):
    reported = run(text)
    assert reported.startswith("error: ") and words in reported


def test_without_tools_every_call_says_that_there_are_none():
    assert run(call("multiply", {}), {}) == "error: there is no tool 'multiply'; the tools are: none"


def test_schema_is_read_off_the_function():
    (first, second, _) = tool_schemas(TOOLS)
    assert first["function"] == {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    }
    assert second["function"]["description"] == "look_up"


def test_flow_ends_where_a_reply_calls_no_tool():
    flow = MultiStepAgentFlow()
    assert flow.is_terminal("The answer is 42.")
    assert not flow.is_terminal(call("multiply", {}))
    assert not flow.is_terminal('<tool_call>{"name": "mul')


def test_flow_runs_the_tools_that_its_class_names():
    class Calculator(MultiStepAgentFlow):
        tools = MappingProxyType({"multiply": multiply})

    assert asyncio.run(Calculator().execute_tool(call("multiply", {"a": 5}))) == "10"
    assert "no tool" in asyncio.run(MultiStepAgentFlow().execute_tool(call("multiply", {"a": 5})))
