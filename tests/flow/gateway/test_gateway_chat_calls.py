"""Chat clients with freeform tools, or with functions in place of tools: each reads calls in its own form, on one path."""

import json
from contextlib import asynccontextmanager

import pytest
from gateway_cases import chat, events_of, renderer

from penstock.gateway.graph import prompts
from penstock.testing import ScriptedEngine, workbench

MULTIPLY = {"name": "multiply", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edit files."}}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'
EDIT = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+\\u00e9"}}\n</tool_call>'
ASK = {"role": "user", "content": "Do it."}


@asynccontextmanager
async def gateway(script):
    engine = ScriptedEngine(script, renderer().tokenizer, chunk=3)
    async with workbench(engine, renderer()) as bench:
        session = await bench.rollout()
        yield bench.http(session.token), engine, bench, session


async def replied(http, messages, *, stream, **fields):
    """The message and the finish reason; a streamed message is put together from its pieces."""
    answer = await chat(http, *messages, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    if not stream:
        [choice] = answer.json()["choices"]
        return choice["message"], choice["finish_reason"]
    message, finish = {"role": "assistant", "content": ""}, None
    for [choice] in [event["choices"] for event in events_of(answer) if event != "[DONE]"]:
        merge(message, choice["delta"])
        finish = choice["finish_reason"] or finish
    return message, finish


def merge(whole, part):
    for key, value in part.items():
        if key == "tool_calls":
            calls = whole.setdefault(key, [])
            for each in value:
                calls.extend({} for _ in range(each["index"] + 1 - len(calls)))
                merge(calls[each["index"]], {name: other for name, other in each.items() if name != "index"})
        elif isinstance(value, dict):
            merge(whole.setdefault(key, {}), value)
        elif key in ("content", "arguments", "input"):
            whole[key] = (whole.get(key) or "") + (value or "")
        else:
            whole[key] = value


async def assert_one_path(bench, session, steps):
    attempt = await bench.attempt(session)
    assert len(attempt.steps) == steps and [node.reason for node in attempt.nodes] == [None] * steps
    ids = prompts(attempt)
    assert ids[1][: len(ids[0])] == ids[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_are_called_and_answered_in_their_own_form(stream):
    async with gateway([CALL, "36."]) as (http, _, bench, session):
        fields = {"functions": [MULTIPLY], "function_call": "auto", "stream": stream}
        message, finish = await replied(http, [ASK], **fields)
        assert finish == "function_call" and "tool_calls" not in message
        assert message["function_call"]["name"] == "multiply" and json.loads(message["function_call"]["arguments"]) == {"a": 6}
        history = [ASK, message, {"role": "function", "name": "multiply", "content": "36"}]
        assert (await replied(http, history, **fields))[0]["content"] == "36."
        await assert_one_path(bench, session, 2)
        assert not bench.gateway.counts


async def test_a_function_that_must_be_called_is():
    async with gateway(['{"a": 1}}\n</tool_call>']) as (http, engine, _, _):
        message, _ = await replied(http, [ASK], functions=[MULTIPLY], function_call={"name": "multiply"}, stream=False)
        assert message["function_call"]["name"] == "multiply"
        assert engine.samplings[0].grammar is not None


async def test_without_calls_a_function_is_not_read():
    async with gateway([CALL]) as (http, _, _, _):
        message, finish = await replied(http, [ASK], functions=[MULTIPLY], function_call="none", stream=False)
        assert message["content"] == CALL and finish == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_freeform_call_is_text_for_client_and_json_for_model(stream):
    async with gateway([EDIT + "\n" + CALL, "Done."]) as (http, _, bench, session):
        tools = [PATCH, {"type": "function", "function": MULTIPLY}]
        message, finish = await replied(http, [ASK], tools=tools, stream=stream)
        [edit, times] = message["tool_calls"]
        assert finish == "tool_calls" and edit["custom"] == {"name": "patch", "input": "*** Begin\n+é"} and "function" not in edit
        assert edit["type"] == "custom" and times["function"]["name"] == "multiply"
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in (edit, times)]
        assert (await replied(http, [ASK, message, *results], tools=tools, stream=stream))[0]["content"] == "Done."
        await assert_one_path(bench, session, 2)


async def test_grammar_of_freeform_tool_is_reported_and_counted():
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    async with gateway(["Hi."]) as (http, engine, bench, _):
        await replied(http, [ASK], tools=[{"type": "custom", "custom": {"name": "patch", "format": form}}], stream=False)
        assert "[a-z]+" in renderer().tokenizer.decode(engine.prompts[0])
        assert bench.gateway.counts == {"ignored:tools.format": 1}


async def test_tools_of_the_vendors_servers_are_left_out_and_counted():
    async with gateway(["Hi."]) as (http, engine, bench, _):
        tools = [{"type": "web_search_preview"}, {"type": "function", "function": MULTIPLY}]
        await replied(http, [ASK], tools=tools, stream=False)
        assert "web_search" not in renderer().tokenizer.decode(engine.prompts[0])
        assert bench.gateway.counts == {"ignored:tool:web_search_preview": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [MULTIPLY], "tools": [PATCH]}, "functions"),
        ({"functions": [{"parameters": {}}]}, "functions[0]"),
        ({"functions": [MULTIPLY], "function_call": {"name": "divide"}}, "function_call"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ],
)
async def test_what_is_wrong_with_them_is_named(fields, param):
    async with gateway(["Hi."]) as (http, _, _, _):
        answer = await chat(http, ASK, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
