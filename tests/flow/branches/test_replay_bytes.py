"""What a client gets from a replay, in each dialect: the bytes that it got before."""

import asyncio

import pytest
from rollout_cases import TASK

from penstock.records import BranchPoint, Sampling, make_rollout
from penstock.testing import ScriptedEngine, workbench

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}


async def chat(client, rollout, **options):
    messages = [{"role": "user", "content": "2 plus 3?"}]
    bodies = []
    for _ in range(2):
        asked = {"model": "any", "messages": messages, "tools": [CHAT_TOOL], "user": rollout, "metadata": {"r": rollout}, **options}
        got = await client.post("/v1/chat/completions", json=asked)
        bodies.append(got)
        if options.get("stream"):
            return bodies
        said = got.json()["choices"][0]["message"]
        messages = [
            *messages,
            said,
            *({"role": "tool", "tool_call_id": c["id"], "content": "5"} for c in said.get("tool_calls", ())),
        ]
    return bodies


async def responses(client, rollout):  # its answers repeat fields of the request, such as metadata
    tool = {"type": "function", "name": "add", "description": "Add.", "parameters": PARAMETERS}
    asked = {"model": "any", "input": "2 plus 3?", "tools": [tool]}
    first = await client.post("/v1/responses", json=asked)
    call = next(item for item in first.json()["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    second = await client.post("/v1/responses", json={**asked, "previous_response_id": first.json()["id"], "input": [result]})
    return [first, second]


async def messages(client, rollout):
    tool = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
    talk = [{"role": "user", "content": "2 plus 3?"}]
    asked = {"model": "any", "max_tokens": 100, "tools": [tool], "metadata": {"user_id": rollout}}
    first = await client.post("/v1/messages", json={**asked, "messages": talk})
    used = next(part for part in first.json()["content"] if part["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "5"}
    talk += [{"role": "assistant", "content": first.json()["content"]}, {"role": "user", "content": [result]}]
    return [first, await client.post("/v1/messages", json={**asked, "messages": talk})]


async def logprobs(client, rollout):
    return await chat(client, rollout, logprobs=True, return_token_ids=True)


@pytest.mark.parametrize("talk", [chat, logprobs, responses, messages])
def test_a_replayed_reply_has_the_same_bytes(renderer, talk):
    async def main():
        replies = [CALL, "It is 5.", "Now it is something else."]
        engine = ScriptedEngine(replies, renderer.tokenizer)
        async with workbench(engine, renderer) as bench:
            session = await bench.rollout()
            recorded = await talk(bench.http(session.token), "first")
            branch = await opened(bench, session.rollout_id, step=1)
            again = await talk(bench.http(branch.token), "another")
            assert [answer.status_code for answer in (*recorded, *again)] == [200] * 4
            assert again[0].content == recorded[0].content
            assert again[1].content != recorded[1].content
            assert branch.branch_problem(ended=True) == ""

    asyncio.run(main())


def test_a_replayed_stream_says_the_same(renderer):
    async def main():  # the recorded rollout was not streamed: how a reply is sent is not part of a request
        async with workbench(ScriptedEngine([CALL, "It is 5."], renderer.tokenizer), renderer) as bench:
            session = await bench.rollout()
            recorded = await chat(bench.http(session.token), "first")
            branch = await opened(bench, session.rollout_id, step=1)
            (streamed,) = await chat(bench.http(branch.token), "another", stream=True)
            call = recorded[0].json()["choices"][0]["message"]["tool_calls"][0]
            assert recorded[0].json()["id"] in streamed.text and call["id"] in streamed.text and "[DONE]" in streamed.text

    asyncio.run(main())


def test_retry_gets_replay_again_and_nothing_is_recorded_twice(renderer):
    async def main():
        async with workbench(ScriptedEngine([CALL, "It is 5."], renderer.tokenizer), renderer) as bench:
            session = await bench.rollout()
            await chat(bench.http(session.token), "first")
            branch = await opened(bench, session.rollout_id, step=1)
            asked = {"model": "any", "messages": [{"role": "user", "content": "2 plus 3?"}], "tools": [CHAT_TOOL]}
            client = bench.http(branch.token)
            first = await client.post("/v1/chat/completions", json=asked)
            again = await client.post("/v1/chat/completions", json={**asked, "user": "b"}, headers={"x-stainless-retry-count": "1"})
            assert first.content == again.content
            assert len((await bench.attempt(branch)).steps) == 1

    asyncio.run(main())


async def opened(bench, rollout_id, step):
    """A branch of a recorded rollout."""
    point = BranchPoint(rollout_id=rollout_id, step=step)
    rollout = make_rollout(f"{rollout_id}.step{step}", TASK.id, 0, channel="branch", branch=point)
    await bench.pool.open_group(TASK, [rollout], seq=None)
    return bench.reopen(rollout, sampling=Sampling(max_tokens=1024))
