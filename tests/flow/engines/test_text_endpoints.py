"""Agents in front of endpoints that give text: the endpoint is a gateway of ours, over HTTP, in either vendor's form."""

import asyncio
import json
import random
from itertools import product

import pytest
from anthropic import AsyncAnthropic
from gateway_cases import TOOL, USER, renderer
from openai import AsyncOpenAI
from random_requests import random_request
from text_endpoint_cases import KEY, Answer, Both, Endpoint, gateway_before, gateway_to, message_stream

from penstock.testing import ScriptedEngine, ScriptedReply
from penstock.train.sequences import exactness, read_graph, why_untrainable

KINDS = ("openai", "anthropic")
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'
FUNCTION = TOOL["function"]
RESULT = "it is 42"


def scripted(*replies: str | ScriptedReply) -> ScriptedEngine:
    return ScriptedEngine(replies, renderer().tokenizer, chunk=2)


async def chat(client: AsyncOpenAI, stream: bool, history: list | None = None):
    asked = {"model": "openai/osmosis-rollout", "messages": history or [USER], "tools": [TOOL]}
    if not stream:
        return await client.chat.completions.create(**asked)
    events = client.chat.completions.stream(**asked, stream_options={"include_usage": True})
    async with events as stream_:
        return await stream_.get_final_completion()


async def by_chat(both: Both, stream: bool) -> tuple[dict, str, int]:
    async with AsyncOpenAI(api_key=both.session.token, base_url=both.session.base_url, max_retries=0) as client:
        first = (await chat(client, stream)).choices[0]
        [call] = first.message.tool_calls
        assert first.finish_reason == "tool_calls"
        reported = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        last = await chat(client, stream, [USER, first.message.model_dump(exclude_none=True, exclude={"parsed"}), reported])
        return json.loads(call.function.arguments), last.choices[0].message.content, last.usage.prompt_tokens


async def by_responses(both: Both, stream: bool) -> tuple[dict, str, int]:
    tools = [{"type": "function", "name": FUNCTION["name"], "parameters": FUNCTION["parameters"], "strict": False}]
    async with AsyncOpenAI(api_key=both.session.token, base_url=both.session.base_url, max_retries=0) as client:

        async def ask(given: list, **more):
            asked = {"model": "any", "input": given, "tools": tools, **more}
            if not stream:
                return await client.responses.create(**asked)
            async with client.responses.stream(**asked) as events:
                return await events.get_final_response()

        first = await ask([USER])
        [call] = [item for item in first.output if item.type == "function_call"]
        reported = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
        last = await ask(reported, previous_response_id=first.id)
        return json.loads(call.arguments), last.output_text, last.usage.input_tokens


async def by_messages(both: Both, stream: bool) -> tuple[dict, str, int]:
    tools = [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]
    root = both.session.base_url.removesuffix("/v1")
    async with AsyncAnthropic(api_key=both.session.token, base_url=root, max_retries=0) as client:

        async def ask(history: list):
            asked = {"model": "any", "messages": history, "tools": tools, "max_tokens": 100}
            if not stream:
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                return await events.get_final_message()

        first = await ask([USER])
        [call] = [block for block in first.content if block.type == "tool_use"]
        said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        reported = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}
        last = await ask([USER, said, reported])
        return call.input, last.content[0].text, last.usage.input_tokens


DIALECTS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}


@pytest.mark.parametrize(("kind", "dialect", "stream"), list(product(KINDS, DIALECTS, (False, True))))
def test_an_agent_calls_a_tool_and_answers_through_an_endpoint(kind, dialect, stream, monkeypatch):
    async def work() -> None:
        engine = scripted(f"Let me see. {CALL}", "It is 42.")
        async with gateway_before(kind, engine, renderer(), monkeypatch.setenv) as both:
            arguments, text, prompt_tokens = await DIALECTS[dialect](both, stream)
            assert (arguments, text) == ({"a": 6}, "It is 42.")
            assert RESULT in renderer().tokenizer.decode(engine.prompts[1])
            attempt, far = await both.attempt(), await both.far_attempt()
            assert [step.message["content"] for step in attempt.steps] == ["Let me see.", "It is 42."]
            assert [(step.completion_ids, step.finish) for step in attempt.steps] == [((), "stop")] * 2
            assert [step.usage.completion_tokens for step in attempt.steps] == [step.sampled for step in far.steps]
            assert [step.usage.prompt_tokens for step in attempt.steps] == [len(prompt) for prompt in engine.prompts]
            assert prompt_tokens == len(engine.prompts[1])
            assert [node.parent for node in attempt.nodes] == [None, 0]

    asyncio.run(work())


def test_text_of_an_endpoint_is_never_trained(monkeypatch):
    async def work() -> None:
        async with gateway_before("openai", scripted(CALL, "42"), renderer(), monkeypatch.setenv) as both:
            await by_chat(both, stream=False)
            attempt = await both.attempt()
            graph = read_graph(attempt)
            assert [why_untrainable(step, graph) for step in attempt.steps] == ["relayed", "relayed"]
            assert (exactness(attempt).sampled_tokens, exactness(attempt).inexact) == (0, {})

    asyncio.run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_text_reaches_the_agent_while_the_endpoint_still_writes(kind, monkeypatch):
    async def work() -> None:
        engine = scripted(ScriptedReply("It is 42, I am quite sure.", stall_after=4))
        async with gateway_before(kind, engine, renderer(), monkeypatch.setenv) as both:
            async with AsyncOpenAI(api_key=both.session.token, base_url=both.session.base_url, max_retries=0) as client:
                stream = await client.chat.completions.create(model="any", messages=[USER], stream=True)
                chunks = aiter(stream)
                while not (await anext(chunks)).choices[0].delta.content:
                    pass
                assert engine.stalling == 1
                await stream.close()
                await engine.idle.wait()  # hanging up goes all the way
            async with asyncio.timeout(10):
                while not (steps := (await both.attempt()).steps):  # noqa: ASYNC110 (stored after the engine has stopped)
                    await asyncio.sleep(0.01)
            [step] = steps
            assert (step.finish, step.message["content"][:5]) == ("cancelled", "It is")

    asyncio.run(work())


def test_sampling_and_several_choices_reach_the_endpoint(monkeypatch):
    async def work() -> None:
        engine = scripted("a", "b")
        async with gateway_before("openai", engine, renderer(), monkeypatch.setenv) as both:
            async with AsyncOpenAI(api_key=both.session.token, base_url=both.session.base_url, max_retries=0) as client:
                given = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["X"], "max_tokens": 500, "n": 2}
                answer = await client.chat.completions.create(model="any", messages=[USER], **given)
            assert sorted(choice.message.content for choice in answer.choices) == ["a", "b"]
            sent = sorted(engine.samplings, key=lambda sampling: sampling.seed or 0)
            assert [(each.temperature, each.top_p, each.seed, each.stop) for each in sent] == [
                (0.5, 0.9, s, ("X",)) for s in (3, 4)
            ]
            assert {each.max_tokens for each in sent} == {200}  # the run's cap
            assert both.bench.gateway.counts["capped:max_tokens"] == 1

    asyncio.run(work())


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"messages": [USER], "return_token_ids": True}, "leave return_token_ids out"),
        ("/v1/completions", {"prompt": "6 times 7"}, "use /v1/chat/completions"),
        ("/generate", {"messages": [USER]}, "use /v1/chat/completions"),
        ("/v1/messages/count_tokens", {"messages": [USER]}, "cannot be counted"),
    ],
)
def test_what_needs_tokens_is_refused_plainly(path, body, said, monkeypatch):
    async def work() -> None:
        async with gateway_before("openai", scripted(), renderer(), monkeypatch.setenv) as both:
            headers = {"authorization": f"Bearer {both.session.token}"}
            response = await both.bench.http().post(path, content=json.dumps(body), headers=headers)
            assert response.status_code == 400
            assert "is behind an endpoint that gives text" in response.text and said in response.text
            assert (await both.attempt()).steps == ()

    asyncio.run(work())


def test_what_an_anthropic_endpoint_has_no_word_for_is_counted(monkeypatch):
    async def work() -> None:
        async with gateway_before("anthropic", scripted("42."), renderer(), monkeypatch.setenv) as both:
            client = both.bench.openai(both.session)
            await client.chat.completions.create(model="any", messages=[USER], seed=1)
            assert both.bench.gateway.counts == {"ignored:seed": 1}

    asyncio.run(work())


PASSED_ON = {
    "/v1/chat/completions": {
        "reasoning_effort": "low",
        "frequency_penalty": 0.5,
        "logit_bias": {"7": 3},
        "top_logprobs": 2,
        "logprobs": True,
        "user": "ann",
        "stop_token_ids": [3],
        "prediction": {"type": "content", "content": "4"},
        "wild_idea": {"a": [1]},
        "modalities": ["text", "audio"],
    },
    "/v1/responses": {
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "presence_penalty": 0.5,
        "wild_idea": 1,
        "user": "ann",
    },
    "/v1/messages": {"output_config": {"effort": "low"}, "metadata": {"user_id": "ann"}},
}
ARRIVED = {
    "/v1/chat/completions": PASSED_ON["/v1/chat/completions"],
    "/v1/responses": {"reasoning_effort": "low", "verbosity": "low", "presence_penalty": 0.5, "wild_idea": 1, "user": "ann"},
    "/v1/messages": {"reasoning_effort": "low", "user": "ann"},
}


@pytest.mark.parametrize("path", PASSED_ON)
def test_what_endpoint_might_do_reaches_it_and_nothing_is_rejected(path, monkeypatch):
    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        async with Endpoint() as far, gateway_to(far) as bench:
            session = await bench.rollout()
            said = {"input": "6 times 7?"} if path == "/v1/responses" else {"messages": [USER]}
            limit = {"max_tokens": 9} if path == "/v1/messages" else {}
            answer = await bench.http(session.token).post(path, json={"model": "any", **said, **limit, **PASSED_ON[path]})
            assert answer.status_code == 200, answer.text
            [sent] = far.requests
            assert {name: sent[name] for name in ARRIVED[path]} == ARRIVED[path]
            assert set(bench.gateway.counts) <= {"ignored:logprobs"}

    asyncio.run(work())


def test_pictures_pass_through_and_are_recorded_by_their_digest(monkeypatch):
    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        async with Endpoint() as far, gateway_to(far) as bench:
            session = await bench.rollout()
            url = f"data:image/png;base64,{'A' * 5000}"
            said = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
            await bench.openai(session).chat.completions.create(model="any", messages=said)
            assert far.requests[0]["messages"] == said and not bench.gateway.counts
            [node] = (await bench.pool.rollout(session.rollout_id)).nodes
            assert node.messages[0]["content"][0]["image_url"]["url"].startswith("sha256:")

    asyncio.run(work())


MARK = {"cache_control": {"type": "ephemeral"}}
AS_SENT = {
    "system": [{"type": "text", "text": "Be brief.", **MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Who won?", **MARK}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I search.", "signature": "vendor's"},
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                {"type": "text", "text": "Nobody."},
            ],
        },
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}]},
    ],
    "tools": [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"name": "look", "input_schema": {"type": "object"}, "defer_loading": True, "input_examples": [{}]},
    ],
    "tool_choice": {"type": "tool", "name": "web_search"},
}
"""What only the vendor's own servers understand, in part."""


def test_anthropic_endpoint_gets_conversation_api_unchanged_sent(monkeypatch):
    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        async with Endpoint(Answer(message_stream({"type": "text", "text": "42"}))) as far, gateway_to(far, "anthropic") as bench:
            session = await bench.rollout()
            body = {"model": "any", "max_tokens": 9, "thinking": {"type": "adaptive"}, "wild_idea": 1, **AS_SENT}
            answer = await bench.http(session.token).post("/v1/messages", json=body)
            assert answer.status_code == 200 and answer.json()["content"] == [{"type": "text", "text": "42"}], answer.text
            [sent] = far.requests
            assert {name: sent[name] for name in AS_SENT} == AS_SENT
            assert (sent["thinking"], sent["wild_idea"], sent["max_tokens"]) == ({"type": "adaptive"}, 1, 9)
            assert not bench.gateway.counts

    asyncio.run(work())


def test_an_anthropic_endpoint_counts_the_tokens_of_a_request(monkeypatch):
    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        async with Endpoint(Answer(b'{"input_tokens": 12}'), Answer(b"{}")) as far, gateway_to(far, "anthropic") as bench:
            http = bench.http((await bench.rollout()).token)
            asked = {"model": "any", **AS_SENT, "tool_choice": {"type": "auto"}}
            answer = await http.post("/v1/messages/count_tokens", json=asked)
            assert (answer.status_code, answer.json()) == (200, {"input_tokens": 12})
            answer = await http.post("/v1/responses/input_tokens", json={"model": "any", "input": "Hello"})
            assert answer.status_code == 502 and "without a number of tokens" in answer.text
            assert far.requests[0] == asked | {"model": "far"} and far.paths == ["messages/count_tokens"] * 2
            assert far.requests[1] == {
                "model": "far",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            }

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_the_signature_of_an_endpoints_thinking_comes_back_to_it(stream, monkeypatch):
    thought = {"type": "thinking", "thinking": "Six sevens.", "signature": "vendor's"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "multiply", "input": {"a": 6}}
    tool = {"name": "multiply", "input_schema": FUNCTION["parameters"]}
    asked = {"model": "any", "max_tokens": 2000, "tools": [tool], "thinking": {"type": "enabled", "budget_tokens": 1024}}

    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        answers = (Answer(message_stream(thought, use, stop="tool_use")), Answer(message_stream({"type": "text", "text": "42"})))
        async with Endpoint(*answers) as far, gateway_to(far, "anthropic") as bench:
            session = await bench.rollout()
            http = bench.http(session.token)
            client = AsyncAnthropic(api_key=session.token, base_url=str(http.base_url), http_client=http)
            said = [{"role": "user", "content": "6 times 7?"}]
            if stream:
                async with client.messages.stream(messages=said, **asked) as events:
                    first = await events.get_final_message()
            else:
                first = await client.messages.create(messages=said, **asked)
            result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "42"}
            blocks = [block.model_dump(exclude_none=True) for block in first.content]
            history = [*said, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            await client.messages.create(messages=history, **asked)
            kept = [{key: block[key] for key in thought} for block in far.requests[1]["messages"][1]["content"][:1]]
            assert kept == [thought] and len(read_graph(await bench.pool.rollout(session.rollout_id)).paths) == 1

    asyncio.run(work())


LEFT_OUT = [
    ("anthropic", "/v1/chat/completions", {"wild": 1, "logit_bias": {"7": 3}, "min_tokens": 3, "frequency_penalty": 1}),
    ("anthropic", "/v1/responses", {"wild": 1, "truncation": "auto", "background": True}),
    ("openai", "/v1/responses", {"truncation": "auto", "conversation": "c"}),
    ("openai", "/v1/messages", {"wild": 1, "thinking": {"type": "adaptive"}}),
]


@pytest.mark.parametrize(("kind", "path", "fields"), LEFT_OUT)
def test_unsupported_options_are_left_out_and_counted(kind, path, fields, monkeypatch):
    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        answers = [Answer(message_stream({"type": "text", "text": "42"}))] if kind == "anthropic" else []
        async with Endpoint(*answers) as far, gateway_to(far, kind) as bench:
            session = await bench.rollout()
            said = {"input": "6 times 7?"} if path == "/v1/responses" else {"messages": [USER], "max_tokens": 9}
            effort = {"reasoning": {"effort": "low"}} if path == "/v1/responses" else {}
            answer = await bench.http(session.token).post(path, json={"model": "any", **said, **effort, **fields})
            assert answer.status_code == 200 and not fields.keys() & far.requests[0].keys(), answer.text
            assert bench.gateway.counts == {f"ignored:{name}": 1 for name in fields}

    asyncio.run(work())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_random_request_is_rejected_on_its_way_to_endpoint(kind, path, monkeypatch):
    dice = random.Random(f"{kind} {path}")

    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        answers = [Answer(message_stream({"type": "text", "text": "42"}))] * 200 if kind == "anthropic" else []
        async with Endpoint(*answers) as far, gateway_to(far, kind) as bench:
            http = bench.http((await bench.rollout()).token)
            for _ in range(60):
                body = random_request(dice, path)
                assert (await http.post(path, json=body)).status_code == 200, body
            assert len(far.requests) >= 60

    asyncio.run(work())


def test_tools_that_endpoints_api_has_no_form_for_are_counted(monkeypatch):
    async def work() -> None:
        monkeypatch.setenv(KEY, "k" * 20)
        async with Endpoint() as far, gateway_to(far) as bench:
            session = await bench.rollout()
            body = {"model": "any", "input": "Who won?", "tools": [{"type": "web_search"}]}
            assert (await bench.http(session.token).post("/v1/responses", json=body)).status_code == 200
            assert bench.gateway.counts == {"ignored:tool:web_search": 1}

    asyncio.run(work())
