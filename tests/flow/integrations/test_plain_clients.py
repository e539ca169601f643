"""Plain `openai` and `anthropic` clients in rollouts: many turns with tools, streams, and the other dialects."""

import asyncio
import json

import pytest
from anthropic import Anthropic
from framework_cases import SECRETS, call, outcome, sent
from openai import OpenAI

from penstock import get_rollout_context
from penstock.records import End

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
FUNCTION = {"type": "function", "function": {"name": "multiply", "parameters": SCHEMA}}
SCRIPT = ["Let me see. " + call("multiply", a=6, b=7), call("multiply", a=42, b=1), "It is 42."]


def multiply(arguments):
    return str(arguments["a"] * arguments["b"])


async def by_chat(ctx):
    client, messages = ctx.openai(), list(ctx.prompt)
    while True:
        answer = await client.chat.completions.create(model="any", messages=messages, tools=[FUNCTION])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for each in message.tool_calls:
            result = multiply(json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


async def by_streamed_chat(ctx):
    client, messages = ctx.openai(), list(ctx.prompt)
    while True:
        async with client.chat.completions.stream(model="any", messages=messages, tools=[FUNCTION]) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for each in message.tool_calls:
            result = multiply(json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


async def by_responses(ctx):
    client, items = ctx.openai(), list(ctx.prompt)
    tools = [{"type": "function", "name": "multiply", "parameters": SCHEMA}]
    while True:
        answer = await client.responses.create(model="any", input=items, tools=tools)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return
        for each in calls:
            result = multiply(json.loads(each.arguments))
            items.append({"type": "function_call_output", "call_id": each.call_id, "output": result})


async def by_messages(ctx, *, stream=False):
    system, *rest = ctx.prompt
    client, messages = ctx.anthropic(), list(rest)
    tools = [{"name": "multiply", "input_schema": SCHEMA}]
    while True:
        request = {"model": "any", "max_tokens": 256, "system": system["content"], "messages": messages, "tools": tools}
        if stream:
            async with client.messages.stream(**request) as answers:
                answer = await answers.get_final_message()
        else:
            answer = await client.messages.create(**request)
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        if answer.stop_reason != "tool_use":
            return
        uses = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": multiply(use.input)} for use in uses]
        messages.append({"role": "user", "content": results})


async def by_streamed_messages(ctx):
    await by_messages(ctx, stream=True)


@pytest.mark.parametrize("run", [by_chat, by_streamed_chat, by_responses, by_messages, by_streamed_messages])
def test_a_tool_loop_is_one_path_in_every_dialect(run):
    done = outcome(SCRIPT, run)
    assert (done.end, done.message, done.breaks, len(done.attempt.steps)) == (End.COMPLETED, "", [], 3)
    assert done.said("main")[:2] == [("system", "Be brief."), ("user", "What is 6 times 7?")]
    assert [text for role, text in done.said("main") if role == "tool"] == ["42", "42"]
    assert done.said("main")[-1] == ("assistant", "It is 42.")
    assert (done.samples["main"].messages, done.samples["main"].steps) == (done.samples["main"].transcript, (0, 1, 2))


def test_every_dialect_records_the_same_tokens():
    """What was asked and answered is the same; the dialect must not show in what is trained on."""
    seen = {
        tuple((step.completion_ids, done.attempt.nodes[step.node].token_ids) for step in done.attempt.steps)
        for done in (outcome(SCRIPT, run) for run in (by_chat, by_responses, by_messages))
    }
    assert len(seen) == 1


def test_two_packages_and_several_transcripts_share_a_rollout():
    async def run(ctx):
        planner, executor = ctx.openai("planner"), ctx.anthropic("executor")
        plan = await planner.chat.completions.create(model="any", messages=ctx.prompt)
        reported = {"role": "user", "content": plan.choices[0].message.content}
        await executor.messages.create(model="any", max_tokens=64, messages=[reported])

    done = outcome(["Multiply.", "42"], run)
    assert (done.transcripts, done.said("executor")) == (["planner", "executor"], [("user", "Multiply."), ("assistant", "42")])


def test_messages_that_workflow_returns_stand_next_to_what_was_sampled():
    async def run(ctx):
        answer = await ctx.openai().chat.completions.create(model="any", messages=ctx.prompt)
        return [{"role": "note", "content": answer.choices[0].message}]

    sample = outcome(["42"], run).samples["main"]
    assert sample.reported_messages == [{"role": "note", "content": {"content": "42", "role": "assistant"}}]
    assert sample.messages[-1] == sample.transcript[-1] == {"role": "assistant", "content": "42"}


def test_sync_clients_work_in_threads():
    async def run(ctx):
        def work():
            hello = [{"role": "user", "content": "Hello"}]
            with OpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
                client.chat.completions.create(model="any", messages=hello)
            with Anthropic(base_url=ctx.base_url.removesuffix("/v1"), api_key=ctx.api_key) as client:
                client.messages.create(model="any", max_tokens=9, messages=hello)

        await asyncio.to_thread(work)

    done = outcome(["1", "2"], run)
    assert (done.end, done.transcripts) == (End.COMPLETED, ["main", "main"])


def test_nothing_of_the_environment_reaches_the_policy(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "leak")
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://leak.invalid/v1")
    hello = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}

    async def both():
        with pytest.raises(Exception, match="400"):
            await get_rollout_context().openai("planner").chat.completions.create(**hello)
        await get_rollout_context().anthropic("planner").messages.create(max_tokens=9, **hello)

    request = sent(both)
    assert "leak" not in request
    assert ("POST /v1/chat/completions" in request, "POST /v1/messages" in request) == (True, True)
    assert request.count("x-sample-id: planner") == request.count("mk-own") == 2


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_client_without_our_address_gets_our_remedy_and_not_packages(monkeypatch, package):
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)

    async def run(ctx):
        if package == "openai":
            from openai import AsyncOpenAI

            await AsyncOpenAI().chat.completions.create(model="gpt-5", messages=ctx.prompt)
        else:
            from anthropic import AsyncAnthropic

            await AsyncAnthropic().messages.create(model="claude", max_tokens=9, messages=[{"role": "user", "content": "?"}])

    done = outcome(["42"], run)
    assert done.end is End.AGENT_ERROR
    assert "no key of a provider is needed here: use ctx.openai() or ctx.anthropic()" in done.message
