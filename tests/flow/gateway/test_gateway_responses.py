import json
from contextlib import asynccontextmanager

import openai
import pytest
from gateway_cases import renderer
from openai import APIError

from penstock.gateway.graph import prompts
from penstock.testing import ScriptedEngine, ScriptedReply, workbench

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+é\\n"}}\n</tool_call>'
MULTIPLY = {"type": "function", "name": "multiply", "parameters": {"type": "object"}, "strict": False}
FREEFORM = {"type": "custom", "name": "patch", "description": "Edit files."}
AGENTS = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [MULTIPLY]}
ASKED = "What is 6 times 7?"


@asynccontextmanager
async def gateway(script, **options):
    """Yields client, engine, bench, session: a real client of a gateway whose engine plays `script`."""
    engine = ScriptedEngine(script, renderer().tokenizer)
    async with workbench(engine, renderer(), **options) as bench:
        session = await bench.rollout()
        yield bench.openai(session), engine, bench, session


async def reply_to(client, stream, **fields):
    """The response, put together from its stream where it is one."""
    if not stream:
        return await client.responses.create(model="any", **fields)
    async with client.responses.stream(model="any", **fields) as events:
        return await events.get_final_response()


def items_of(response):
    """The response's items as clients send them back."""
    return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]


async def is_exact(engine, bench, session):
    """Whether every prompt after the first holds the one before it and the reply to that, token by token."""
    attempt = await bench.attempt(session)
    known = prompts(attempt)
    seen = [known[step.index] + step.completion_ids for step in attempt.steps]
    return all(later[: len(one)] == one for one, later in zip(seen, engine.prompts[1:], strict=False))


async def test_an_answer_is_recorded_and_says_what_was_asked():
    async with gateway(["42."]) as (client, engine, bench, session):
        response = await reply_to(client, False, input=ASKED, instructions="Be brief.", temperature=0.5, max_output_tokens=50)
        (step,) = (await bench.attempt(session)).steps
        assert (response.output_text, response.status, response.id) == ("42.", "completed", f"resp_{step.answer}")
        assert (response.instructions, response.temperature, response.max_output_tokens) == ("Be brief.", 0.5, 50)
        assert response.usage.input_tokens == len(engine.prompts[0])
        assert response.usage.output_tokens == len(step.completion_ids)
        assert "Be brief." in renderer().tokenizer.decode(engine.prompts[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_results_as_items_continue_token_by_token(stream):
    async with gateway([f"Let me see.\n{CALL}\n{CALL}", PATCH, "It is 42."]) as (client, engine, bench, session):
        history = [{"role": "user", "content": ASKED}]
        for _ in range(2):
            response = await reply_to(client, stream, input=history, tools=[MULTIPLY, FREEFORM])
            history += items_of(response)
            for item in response.output:
                if item.type in ("function_call", "custom_tool_call"):
                    history.append({"type": f"{item.type}_output", "call_id": item.call_id, "output": "42"})
        response = await reply_to(client, stream, input=history, tools=[MULTIPLY, FREEFORM])
        assert response.output_text == "It is 42."
        assert [item["type"] for item in history[1:4]] == ["message", "function_call", "function_call"]
        assert (history[6]["type"], history[6]["input"]) == ("custom_tool_call", "*** Begin\n+é\n")
        assert await is_exact(engine, bench, session)
        assert [node.reason for node in (await bench.attempt(session)).nodes] == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_earlier_response_is_continued_by_its_id(stream):
    async with gateway([CALL, "It is 42.", "So it is."]) as (client, engine, bench, session):
        first = await reply_to(client, stream, input=ASKED, tools=[MULTIPLY], instructions="Be brief.")
        result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "42"}
        options = {"tools": [MULTIPLY], "instructions": "Be brief."}
        second = await reply_to(client, stream, input=[result], previous_response_id=first.id, **options)
        third = await reply_to(client, stream, input="Why?", previous_response_id=second.id, **options)
        assert (second.previous_response_id, third.output_text) == (first.id, "So it is.")
        assert await is_exact(engine, bench, session)


async def test_other_instructions_replace_those_of_the_earlier_response():
    async with gateway(["42.", "So it is."]) as (client, engine, bench, session):
        first = await reply_to(client, False, input=ASKED, instructions="Be brief.")
        await reply_to(client, False, input="Why?", previous_response_id=first.id, instructions="Be long.")
        prompt = renderer().tokenizer.decode(engine.prompts[1])
        assert "Be long." in prompt
        assert "Be brief." not in prompt
        assert (await bench.attempt(session)).nodes[1].reason == "history_edited"


async def test_a_response_of_another_rollout_is_not_found():
    async with gateway(["42."]) as (client, _, bench, _):
        response = await reply_to(client, False, input=ASKED)
        other = bench.openai(await bench.rollout("train-1"))
        with pytest.raises(openai.BadRequestError) as refusal:
            await reply_to(other, False, input="Why?", previous_response_id=response.id)
        assert (refusal.value.code, refusal.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_items_of_an_earlier_answer_can_be_referred_to():
    async with gateway([f"Hm. {CALL}", "42."]) as (client, engine, bench, session):
        first = await reply_to(client, False, input=ASKED, tools=[MULTIPLY])
        named = [{"type": "item_reference", "id": item.id} for item in first.output]
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"}
        await reply_to(client, False, input=[{"role": "user", "content": ASKED}, *named, result], tools=[MULTIPLY])
        assert len(named) == 2
        assert await is_exact(engine, bench, session)


async def test_a_call_into_a_namespace_comes_back_split():
    async with gateway([CALL.replace("multiply", "agents__multiply")]) as (client, _, _, _):
        response = await reply_to(client, True, input=ASKED, tools=[AGENTS])
        (call,) = response.output
        assert (call.name, call.namespace, json.loads(call.arguments)) == ("multiply", "agents", {"a": 6})


async def test_a_demanded_call_is_made():
    async with gateway(lambda prompt: '{"a": 6}}\n</tool_call>') as (client, _, _, _):
        response = await reply_to(client, True, input=ASKED, tools=[MULTIPLY], tool_choice={"type": "function", "name": "multiply"})
        (call,) = response.output
        assert (call.type, call.name) == ("function_call", "multiply")


async def test_tokens_are_counted_without_sampling():
    async with gateway(["42."]) as (client, engine, bench, session):
        asked = {"input": ASKED, "instructions": "Be brief.", "tools": [MULTIPLY]}
        counted = await client.responses.input_tokens.count(model="any", **asked)
        response = await reply_to(client, False, **asked)
        assert counted.input_tokens == response.usage.input_tokens == len(engine.prompts[0])
        assert len((await bench.attempt(session)).steps) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_reaches_its_limit_is_incomplete(stream):
    async with gateway(["The answer is forty-two."]) as (client, _, _, _):
        asked = {"model": "any", "input": ASKED, "max_output_tokens": 3}
        if stream:
            events = [event async for event in await client.responses.create(stream=True, **asked)]
            assert events[-1].type == "response.incomplete"
            response = events[-1].response
        else:
            response = await client.responses.create(**asked)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[-1].status == "incomplete"


async def test_text_reaches_the_client_while_the_engine_is_still_sampling():
    async with gateway([ScriptedReply("It is 42.", stall_after=1)], serves=True) as (client, engine, _, _):
        seen = ""
        async for event in await client.responses.create(model="any", input=ASKED, stream=True):
            if event.type == "response.output_text.delta":
                seen += event.delta
                engine.release()
        assert seen == "It is 42."


async def test_arguments_of_freeform_call_reach_client_while_they_are_written():
    size = len(renderer().tokenizer.encode(PATCH.partition("+")[0]))
    async with gateway([ScriptedReply(PATCH, stall_after=size)], serves=True) as (client, engine, *_):
        seen = ""
        async for event in await client.responses.create(model="any", input=ASKED, tools=[FREEFORM], stream=True):
            if event.type == "response.custom_tool_call_input.delta":
                seen += event.delta
                engine.release()
        assert seen == "*** Begin\n+é\n"


async def test_a_stream_that_breaks_off_raises_and_never_completes():
    async with gateway([ScriptedReply("It is 42.", fail_after=2)]) as (client, _, bench, session):
        seen = []
        with pytest.raises(APIError, match="failed"):
            async for event in await client.responses.create(model="any", input=ASKED, stream=True):
                seen.append(event.type)
        assert "response.created" in seen
        assert "response.completed" not in seen
        assert [step.finish for step in (await bench.attempt(session)).steps] == ["error"]


async def test_what_nobody_here_can_run_is_left_out_and_counted():
    async with gateway(["42."]) as (client, _, bench, _):
        asked = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "store": False}
        await reply_to(client, True, input=ASKED, tools=[MULTIPLY, {"type": "web_search"}], **asked)
        assert bench.gateway.counts == {
            "ignored:include:reasoning.encrypted_content": 1,
            "ignored:reasoning.summary": 1,
            "ignored:tool:web_search": 1,
        }
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await reply_to(client, False, input=ASKED, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})


async def test_a_retry_gets_the_same_bytes():
    async with gateway([f"Hm. {CALL}"]) as (_, engine, bench, session):
        http, body = bench.http(session.token), {"model": "any", "input": ASKED, "stream": True, "tools": [MULTIPLY]}
        first = await http.post("/v1/responses", json=body)
        again = await http.post("/v1/responses", json=body, headers={"x-stainless-retry-count": "1"})
        assert first.content == again.content
        assert len(engine.prompts) == 1
