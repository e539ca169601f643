"""Structured output in every dialect, on the tiny policy: replies follow their schema, and what cannot be enforced is refused."""

import asyncio
import json
from contextlib import asynccontextmanager

import jsonschema
import pytest

pytest.importorskip("llguidance")

from penstock.chat.renderer import Renderer
from penstock.config import EmbeddedSection
from penstock.engines.base import open_engine
from penstock.models.pull import resolve
from penstock.testing import workbench

USER = {"role": "user", "content": "Describe something."}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 10, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "count", "flags"],
    "additionalProperties": False,
}
FUNCTION = {"name": "paint", "description": "Paint it.", "parameters": SCHEMA}
OTHER = {"name": "erase", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


@asynccontextmanager
async def gateway(**options):
    """Yields http, bench, session: a gateway with the tiny policy."""
    model = await asyncio.to_thread(resolve, "tiny", lambda *_: None)
    renderer = Renderer.load(model.path)
    section = EmbeddedSection(device="cpu")
    engine = await open_engine(section, model.path, name="tiny", seed=0, decode=renderer.tokenizer.decode)
    try:
        async with workbench(engine, renderer, **options) as bench:
            session = await bench.rollout()
            yield bench.http(session.token), bench, session
    finally:
        await engine.close()


async def ask(http, path, **body):
    response = await http.post(path, json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    return response.json()


def check(text):
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    return value


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_reply_follows_its_schema(stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    async with gateway() as (http, bench, session):
        body = {"model": "tiny", "messages": [USER], "response_format": wanted, "max_tokens": 200, "n": 3, "stream": stream}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        recorded = sorted((await bench.attempt(session)).steps, key=lambda step: step.choice)
        if not stream:
            choices = response.json()["choices"]
            assert {choice["finish_reason"] for choice in choices} == {"stop"}
            assert [choice["message"]["content"] for choice in choices] == [step.message["content"] for step in recorded]
        for step in recorded:
            check(step.message["content"])
            assert step.sampling.grammar is not None and json.loads(step.sampling.grammar.schema) == SCHEMA
            assert step.full_logprobs is None  # at temperature 1 there is one distribution, that of the grammar


async def test_any_object_is_an_object():
    async with gateway() as (http, _, _):
        for seed in range(3):
            fields = {"response_format": {"type": "json_object"}, "max_tokens": 300, "seed": seed}
            answer = await ask(http, "/v1/chat/completions", messages=[USER], **fields)
            choice = answer["choices"][0]
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["message"]["content"]), dict)
            else:
                assert choice["finish_reason"] == "length" and choice["message"]["content"].lstrip().startswith("{")


async def test_reply_that_is_cut_reports_it():
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    async with gateway() as (http, _, _):
        answer = await ask(http, "/v1/chat/completions", messages=[USER], response_format=wanted, max_tokens=5)
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_responses_and_messages_follow_their_schema():
    async with gateway() as (http, _, _):
        form = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
        answer = await ask(http, "/v1/responses", input="Hi", text={"format": form}, max_output_tokens=200)
        check(answer["output"][0]["content"][0]["text"])
        assert answer["text"]["format"] == form
        for field in ({"output_config": {"format": form}}, {"output_format": {"type": "json_schema", "schema": SCHEMA}}):
            answer = await ask(http, "/v1/messages", messages=[USER], max_tokens=200, **field)
            check(answer["content"][0]["text"])


async def test_call_that_must_be_made_has_arguments_of_its_schema():
    tools = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": OTHER}]
    async with gateway() as (http, _, _):
        named = {"type": "function", "function": {"name": "paint"}}
        made = 0
        for choice in (named, "required", "required", "required"):
            fields = {"tools": tools, "tool_choice": choice, "max_tokens": 200}
            answer = (await ask(http, "/v1/chat/completions", messages=[USER], **fields))["choices"][0]
            if answer["finish_reason"] == "length":  # it went on to call, and its last call is incomplete
                continue
            assert answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
            made += 1
            for call in answer["message"]["tool_calls"]:
                schema = {"paint": SCHEMA, "erase": OTHER["parameters"]}[call["function"]["name"]]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        assert made >= 2
        offered = [{"name": each["name"], "input_schema": each["parameters"]} for each in (FUNCTION, OTHER)]
        asked = {"tools": offered, "tool_choice": {"type": "tool", "name": "paint"}, "max_tokens": 200}
        answer = await ask(http, "/v1/messages", messages=[USER], **asked)
        assert answer["stop_reason"] == "tool_use"
        jsonschema.validate(answer["content"][0]["input"], SCHEMA)


async def test_a_strict_tool_binds_calls_that_the_model_may_make():
    """The tiny policy calls `multiply` with two numbers; here the schema allows other arguments only."""
    parameters = {"type": "object", "properties": {"a": {"enum": [7]}, "b": {"enum": [8]}}, "required": ["a", "b"]}
    function = {"name": "multiply", "strict": True, "parameters": parameters | {"additionalProperties": False}}
    user = {"role": "user", "content": "3 * 4"}
    async with gateway() as (http, _, _):
        calls = []
        for seed in range(12):
            fields = {"tools": [{"type": "function", "function": function}], "max_tokens": 80, "seed": seed}
            message = (await ask(http, "/v1/chat/completions", messages=[user], **fields))["choices"][0]["message"]
            calls += [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        assert calls and all(call == {"a": 7, "b": 8} for call in calls)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called(mode):
    """The tiny policy calls `multiply`, here one of three that it is offered; it may call the two others."""
    names = ("multiply", "add", "erase")
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": numbers}} for name in names]
    listed = [{"type": "function", "function": {"name": name}} for name in names[1:]]
    bound = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
    async with gateway() as (http, bench, _):
        called = {"auto": set(), bound["type"]: set()}
        for seed in range(8):
            for choice in ("auto", bound):
                fields = {"tools": tools, "tool_choice": choice, "max_tokens": 60, "seed": seed}
                user = {"role": "user", "content": "3 * 4"}
                message = (await ask(http, "/v1/chat/completions", messages=[user], **fields))["choices"][0]["message"]
                made = {call["function"]["name"] for call in message.get("tool_calls") or ()}
                called[choice if choice == "auto" else choice["type"]] |= made
        assert "multiply" in called["auto"] and called["allowed_tools"] <= {"add", "erase"}
        assert called["allowed_tools"] or mode == "auto"
        assert not [name for name in bench.gateway.counts if name.startswith("ignored")]


async def test_forced_call_of_schema_that_cannot_be_enforced_is_counted():
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    async with gateway() as (http, bench, _):
        await ask(http, "/v1/chat/completions", messages=[USER], tools=tools, tool_choice="required", max_tokens=40)
        assert bench.gateway.counts["ignored:tools.parameters"] == 1


async def test_schema_that_cannot_be_enforced_is_rejected_with_reason():
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "name": "x", "schema": unique}
    strict = {"name": "f", "strict": True}
    good = {"type": "function", "function": {"name": "g", "strict": True, "parameters": SCHEMA}}
    chat, said = "/v1/chat/completions", {"messages": [USER], "max_tokens": 20}
    tools = [good, {"type": "function", "function": strict | {"parameters": unique}}]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    why = 'cannot be enforced: Unimplemented keys: ["uniqueItems"]'
    asked = [
        (chat, said | {"response_format": {"type": "json_schema", "json_schema": form}}, f"response_format: the schema {why}"),
        ("/v1/responses", {"input": "Hi", "text": {"format": form}}, f"text.format: the schema {why}"),
        ("/v1/messages", said | {"output_config": {"format": form}}, f"output_config.format: the schema {why}"),
        (chat, said | {"tools": tools}, f"tools: the schema of 'f' {why}"),
        (chat, said | {"tools": tools, "response_format": wanted}, f"tools: the schema of 'f' {why}"),
        ("/v1/messages", said | {"tools": [strict | {"input_schema": unique}]}, f"tools: the schema of 'f' {why}"),
    ]
    async with gateway() as (http, _, _):
        for path, body, message in asked:
            response = await http.post(path, json={"model": "tiny", **body})
            assert response.status_code == 400 and response.json()["error"]["message"] == message, response.text
