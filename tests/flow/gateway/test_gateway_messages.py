import asyncio
import warnings
from contextlib import asynccontextmanager

import orjson
import pytest
from gateway_cases import renderer

from penstock.gateway.graph import prompts
from penstock.testing import CHATML, ScriptedEngine, ScriptedReply, workbench

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import anthropic
    from anthropic import beta_async_tool, beta_tool

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'
TOOL = {"name": "multiply", "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}}}
USER = {"role": "user", "content": "What is 6 times 7?"}
ASKED = {"model": "any", "max_tokens": 100}


@asynccontextmanager
async def gateway(script, *, template=CHATML, **options):
    """Yields client, engine, bench, session: a gateway whose engine plays `script`."""
    rendering = renderer(template=template)
    engine = options.pop("engine", None) or ScriptedEngine(script, rendering.tokenizer)
    async with workbench(engine, rendering, **options) as bench:
        session = await bench.rollout()
        yield made_client(bench, session), engine, bench, session


def made_client(bench, session, **options):
    options = {"api_key": session.token, "http_client": bench.http(), "max_retries": 0} | options
    return anthropic.AsyncAnthropic(base_url=session.base_url, **options)


async def ask(client, *messages, stream=False, **fields):
    """A call by the SDK, put together by the SDK where it is streamed."""
    body = ASKED | {"messages": list(messages)} | fields
    if not stream:
        return await client.messages.create(**body)
    async with client.messages.stream(**body) as events:
        return await events.get_final_message()


async def post(bench, session, body, **headers):
    return await bench.http(session.token).post("/v1/messages?beta=true", content=orjson.dumps(ASKED | body), headers=headers)


async def is_one_path(bench, session, engine):
    """Whether every prompt but the first continues from the tokens of the one before, as they were sampled."""
    attempt = await bench.attempt(session)
    assert set(prompts(attempt).values()) == set(engine.prompts)
    before = [prompt + step.completion_ids for prompt, step in zip(engine.prompts, attempt.steps, strict=True)]
    assert [node.reason for node in attempt.nodes] == [None] * len(attempt.nodes)
    return all(now[: len(then)] == then for then, now in zip(before, engine.prompts[1:], strict=False))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdk_reads_an_answer_and_its_step_is_recorded(stream):
    async with gateway(["42."]) as (client, engine, bench, session):
        answer = await ask(client, USER, stream=stream, system="Be brief.")
        (step,) = (await bench.attempt(session)).steps
        assert [(block.type, block.text) for block in answer.content] == [("text", "42.")]
        assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == ("assistant", "scripted", "end_turn", None)
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(engine.prompts[0]), len(step.completion_ids))
        assert answer.id == f"msg_{step.answer}"
        assert "Be brief." in renderer().tokenizer.decode(engine.prompts[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_conversation_continues_token_by_token(stream):
    async with gateway([f"I see.\n{CALL}", f"{CALL}\n{CALL}", "42."]) as (client, engine, bench, session):
        history = [USER]
        while (answer := await ask(client, *history, tools=[TOOL], stream=stream)).stop_reason == "tool_use":
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": str(block.input["a"] * 7)}]}
                for block in answer.content
                if block.type == "tool_use"
            ]
            reminder = {"type": "text", "text": "<system-reminder>go on</system-reminder>"}
            history += [answer.to_param(), {"role": "user", "content": [*results, reminder]}]
        assert answer.content[0].text == "42."
        assert len(engine.prompts) == 3
        assert await is_one_path(bench, session, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(stream):
    async with gateway(["go STOP and on"]) as (client, _, _, _):
        answer = await ask(client, USER, stop_sequences=["no", "STOP"], stream=stream)
        assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "STOP", "go ")


@pytest.mark.parametrize("stream", [False, True])
async def test_reply_cut_short_reports_it(stream):
    async with gateway(["The answer is 42."]) as (client, _, _, _):
        assert (await ask(client, USER, max_tokens=2, stream=stream)).stop_reason == "max_tokens"


async def test_tokens_are_counted_as_the_call_itself_would():
    async with gateway(["42."]) as (client, engine, bench, session):
        body = {"system": "Be brief.", "tools": [TOOL], "messages": [USER]}
        counted = await client.messages.count_tokens(model="any", **body)
        answer = await client.messages.create(**ASKED | body)
        assert counted.input_tokens == answer.usage.input_tokens == len(engine.prompts[0])
        assert len((await bench.attempt(session)).steps) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_shown_apart_and_may_come_back_or_not(stream):
    async with gateway(["<think>\neasy\n</think>\n\n42."] * 3, template=CHATML + "{# reasons inside <think></think> #}") as (
        client,
        engine,
        bench,
        session,
    ):
        first = await ask(client, USER, stream=stream)
        assert [block.type for block in first.content] == ["thinking", "text"]
        assert (first.content[0].thinking.strip(), first.content[1].text.strip()) == ("easy", "42.")
        second = await ask(client, USER, first.to_param(), USER, stream=stream)
        dropped = [
            {"role": "assistant", "content": [block for block in each.content if block.type == "text"]} for each in (first, second)
        ]
        await ask(client, USER, dropped[0], USER, dropped[1], USER, stream=stream)
        assert await is_one_path(bench, session, engine)


async def test_a_malformed_call_neither_breaks_the_sdk_nor_the_path():
    async with gateway([CALL.replace("6", ""), "42."]) as (client, engine, bench, session):
        answer = await ask(client, USER, tools=[TOOL], stream=True)
        (use,) = answer.content
        assert use.input == {"a": None, "INVALID_JSON": '{"a": }'}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "no JSON", "is_error": True}
        await ask(client, USER, answer.to_param(), {"role": "user", "content": [result]}, tools=[TOOL], stream=True)
        assert await is_one_path(bench, session, engine)


@pytest.mark.parametrize("options", [{}, {"thread": False}])
async def test_the_tool_runner_works_over_threads_and_without(options):
    @beta_async_tool
    async def multiply(a: float) -> str:
        """Multiply a by 7."""
        return str(a * 7)

    async with gateway([CALL, CALL, "42."]) as (_, engine, bench, session):
        sent, http = [], bench.http()

        async def note(request):
            sent.append(orjson.loads(request.content))

        http.event_hooks = {"request": [note]}
        client = made_client(bench, session, http_client=http)
        runner = client.beta.messages.tool_runner(**ASKED, tools=[multiply], messages=[USER], system="Be brief.", **options)
        answer = await runner.until_done()
        assert answer.content[0].text == "42."
        assert [len(body["messages"]) for body in sent] == ([1, 3, 5] if options else [1, 1, 1])
        assert await is_one_path(bench, session, engine)
        assert len((await bench.attempt(session)).nodes) == 3
        assert not bench.gateway.counts


async def test_thread_continues_from_any_known_answer():
    async with gateway(["42.", "43.", "44."]) as (client, engine, _, _):
        first = await ask(client, USER, system="Be brief.", tools=[TOOL])
        for _ in range(2):
            await client.beta.messages.create(
                **ASKED, messages=[USER], thread={"type": "continue", "previous_message_id": first.id}
            )
        assert engine.prompts[1] == engine.prompts[2]
        assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.beta.messages.create(
                **ASKED, messages=[USER], thread={"type": "continue", "previous_message_id": "msg_none"}
            )
        assert caught.value.error_code == "thread_not_found"


async def test_the_synchronous_sdk_streams_runs_tools_and_counts():
    @beta_tool
    def multiply(a: float) -> str:
        """Multiply a by 7."""
        return str(a * 7)

    def calls(client):
        runner = client.beta.messages.tool_runner(**ASKED, tools=[multiply], messages=[USER], stream=True)
        finals = [stream.get_final_message() for stream in runner]
        with client.messages.stream(**ASKED, messages=[USER]) as stream:
            said = "".join(stream.text_stream)
        return finals, said, client.messages.count_tokens(model="any", messages=[USER]).input_tokens

    async with gateway([CALL, "42.", "Hello."], serves=True) as (_, engine, _, session):
        with anthropic.Anthropic(api_key=session.token, base_url=session.base_url, max_retries=0) as client:
            finals, said, counted = await asyncio.to_thread(calls, client)
        assert [final.stop_reason for final in finals] == ["tool_use", "end_turn"]
        assert (said, counted) == ("Hello.", len(engine.prompts[2]))


async def test_events_arrive_while_the_engine_still_samples():
    engine = ScriptedEngine([ScriptedReply("The answer is 42.", stall_after=5)], renderer().tokenizer)
    serving = gateway(None, engine=engine, serves=True)
    async with serving as (client, *_), client.messages.stream(**ASKED, messages=[USER]) as events:
        running = [(event.text, engine.running, engine.release()) async for event in events if event.type == "text"]
        assert running[0][1] == 1
        assert "".join(text for text, *_ in running) == "The answer is 42."
        assert (await events.get_final_message()).content[0].text == "The answer is 42."


async def test_a_forced_call_is_made():
    begun = renderer().begin("multiply")[1]
    assert CALL.startswith(begun)
    async with gateway([CALL[len(begun) :]]) as (client, *_):
        answer = await ask(client, USER, tools=[TOOL], tool_choice={"type": "tool", "name": "multiply"})
        assert [(block.type, block.name, block.input) for block in answer.content] == [("tool_use", "multiply", {"a": 6})]


async def test_what_a_coding_agent_sends_is_one_path():
    """Labels move, single blocks become strings, the vendor's header changes, and a system message stands among the turns."""

    def body(number, *turns):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={number};"},
            {"type": "text", "text": "Be brief."},
        ]
        agent = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "metadata": {"user_id": "u"}}
        return agent | {"system": system, "tools": [TOOL], "messages": list(turns), "max_tokens": 32000, "stream": True}

    def marked(text):
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]

    async with gateway([CALL, "42."]) as (_, engine, bench, session):
        among = {"role": "system", "content": "You may use tools."}
        await post(bench, session, body(1, {"role": "user", "content": marked("go")}, among))
        (step,) = (await bench.attempt(session)).steps
        use = {"type": "tool_use", "id": step.message["tool_calls"][0]["id"], "name": "multiply", "input": {"a": 6}}
        made = [{"role": "user", "content": "go"}, among, {"role": "assistant", "content": [use]}]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "42", "is_error": False}
        answer = await post(bench, session, body(2, *made, {"role": "user", "content": [result, *marked("and?")]}))
        assert b"message_stop" in answer.content
        assert await is_one_path(bench, session, engine)
        expected = {"thinking": 2, "output_config.effort": 2, "system:billing_header": 2}
        assert {name: bench.gateway.counts[f"ignored:{name}"] for name in expected} == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_bytes(stream):
    async with gateway(["42."]) as (_, _, bench, session):
        first = await post(bench, session, {"messages": [USER], "stream": stream})
        again = await post(bench, session, {"messages": [USER], "stream": stream}, **{"x-stainless-retry-count": "1"})
        assert first.content == again.content
        assert len((await bench.attempt(session)).steps) == 1


async def test_refusals_are_the_sdks_own_errors():
    async with gateway([ScriptedReply(busy=True)]) as (client, _, bench, session):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, {"role": "user", "content": [{"type": "image", "source": {"type": "cloud"}}]})
        assert (caught.value.type, caught.value.error_code) == ("invalid_request_error", "invalid_value")
        assert "messages[0].content[0]" in caught.value.api_message
        with pytest.raises(anthropic.AuthenticationError) as denied:
            await ask(made_client(bench, session, api_key="wrong"), USER)
        assert denied.value.type == "authentication_error"
        with pytest.raises(anthropic.ServiceUnavailableError) as busy:
            await ask(client, USER)
        assert (busy.value.type, busy.value.error_code) == ("api_error", "engine_busy")
        assert not (await bench.attempt(session)).steps


async def test_overlong_prompt_is_rejected_in_known_words():
    async with gateway(None, engine=ScriptedEngine(["42."], renderer().tokenizer, context_length=16)) as (client, _, _, _):
        with pytest.raises(anthropic.BadRequestError, match="maximum"):
            await ask(client, USER)


async def test_a_stream_that_breaks_off_raises_in_the_sdk():
    async with gateway([ScriptedReply("The answer is 42.", fail_after=4)]) as (client, _, _, _):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client, USER, stream=True)
        assert caught.value.type == "api_error"
