import asyncio
from contextlib import asynccontextmanager

import pytest
from gateway_cases import TOOL, USER, chat, events_of, messages_of, renderer

from penstock.errors import ConfigError
from penstock.gateway import Gateway, GatewayLimits
from penstock.gateway.graph import prompts
from penstock.records import End, Sampling
from penstock.testing import ScriptedEngine, ScriptedReply, memory_pool, workbench

STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}, "unevaluatedItems": False}}}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'


@asynccontextmanager
async def gateway(script, **options):
    """Yields http, engine, bench, session: a gateway whose engine plays `script`."""
    engine = options.pop("engine", None) or ScriptedEngine(script, renderer().tokenizer)
    async with workbench(engine, renderer(), **options) as bench:
        session = await bench.rollout()
        yield bench.http(session.token), engine, bench, session


async def test_an_answer_has_the_openai_shape_and_a_recorded_step():
    async with gateway(["42."]) as (http, engine, bench, session):
        answer = (await chat(http, USER)).json()
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "scripted"
        assert answer["choices"] == [
            {"index": 0, "message": {"role": "assistant", "content": "42."}, "finish_reason": "stop", "logprobs": None}
        ]
        (step,) = (await bench.attempt(session)).steps
        assert answer["usage"] == {
            "prompt_tokens": len(engine.prompts[0]),
            "completion_tokens": len(step.completion_ids),
            "total_tokens": len(engine.prompts[0]) + len(step.completion_ids),
        }
        assert step.completion_ids[-1] == renderer().stop_ids[0]


async def test_sampling_fields_reach_the_engine_and_the_record():
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": ["x", "y"], "seed": 3, "max_tokens": 9}
    async with gateway(["42."]) as (http, engine, bench, session):
        await chat(http, USER, **fields)
        (sampling,) = engine.samplings
        assert sampling == Sampling(**fields | {"stop": ("x", "y"), "stop_ids": renderer().stop_ids})
        step = (await bench.attempt(session)).steps[0]
        assert step.sampling == sampling
        assert step.full_logprobs != step.logprobs


async def test_bias_that_bans_or_chooses_tokens_reaches_engine_and_record():
    async with gateway(["42.", "42."]) as (http, engine, bench, session):
        await chat(http, USER, logit_bias={"9": -100, "7": -100, "5": 0})
        await chat(http, USER, logit_bias={"8": 100})
        banned, only = (step.sampling for step in (await bench.attempt(session)).steps)
        assert (banned.banned_ids, banned.only_ids, only.banned_ids, only.only_ids) == ((7, 9), (), (), (8,))
        assert engine.samplings == [banned, only] and not bench.gateway.counts
        refused = await chat(http, USER, logit_bias={"8": 100}, response_format={"type": "json_object"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logit_bias"


async def test_defaults_come_from_rollout_and_max_tokens_is_cap():
    async with gateway(["The answer is 42."]) as (http, engine, bench, session):
        bench.gateway.open((await bench.attempt(session)).ref, Sampling(temperature=0.25, max_tokens=3))
        answer = (await chat(http, USER, max_completion_tokens=100)).json()
        assert engine.samplings[0].temperature == 0.25
        assert answer["choices"][0]["finish_reason"] == "length"
        assert bench.gateway.counts == {"capped:max_tokens": 1, "finish:length": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_is_kept_in_record_and_cut_from_text(stream):
    async with gateway(None, engine=ScriptedEngine(["go STOP and on"], renderer().tokenizer, chunk=50)) as (
        http,
        engine,
        bench,
        session,
    ):
        answer = await chat(http, USER, stop="STOP", stream=stream)
        assert messages_of(answer)[0]["content"] == "go "
        step = (await bench.attempt(session)).steps[0]
        assert renderer().tokenizer.decode(step.completion_ids) == "go STOP"
        assert (step.finish, step.message["content"]) == ("stop", "go ")
        assert engine.running == 0


async def test_after_a_stop_string_the_turn_is_closed():
    async with gateway(["go STOP and on", "42."]) as (http, engine, _, _):
        await chat(http, USER, stop="STOP")
        await chat(http, USER, {"role": "assistant", "content": "go "}, USER)
        core = renderer().tokenizer.core
        rest = engine.prompts[1][len(engine.prompts[0]) :]
        asked = f"<|im_end|>\n<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert core.decode(rest, skip_special_tokens=False) == "go STOP" + asked


async def test_several_choices_share_a_node_and_differ_in_seed():
    async with gateway(["a", "b", "c"]) as (http, engine, bench, session):
        answer = await chat(http, USER, n=3, seed=5)
        assert [m["content"] for m in messages_of(answer)] == ["a", "b", "c"]
        attempt = await bench.attempt(session)
        assert len(attempt.nodes) == 1
        assert [step.sampling.seed for step in attempt.steps] == [5, 6, 7]
        assert set(prompts(attempt).values()) == set(engine.prompts)


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_come_back_parsed_and_continue_token_by_token(stream):
    async with gateway([f"I see.\n{CALL}", "42."]) as (http, engine, bench, session):
        answer = await chat(http, USER, tools=[TOOL], stream=stream)
        (message,) = messages_of(answer)
        assert message["content"] == "I see."
        assert message["tool_calls"][0]["function"] == {"name": "multiply", "arguments": '{"a": 6}'}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
        await chat(http, USER, message, result, tools=[TOOL], stream=stream)
        first = (await bench.attempt(session)).steps[0]
        before = engine.prompts[0] + first.completion_ids
        assert engine.prompts[1][: len(before)] == before


async def test_tool_choice_none_shows_the_tools_but_reads_no_calls():
    async with gateway([CALL]) as (http, engine, _, _):
        answer = await chat(http, USER, tools=[TOOL], tool_choice="none")
        assert messages_of(answer)[0] == {"role": "assistant", "content": CALL}
        assert "multiply" in renderer().tokenizer.decode(engine.prompts[0])


async def test_markup_without_tools_is_text():
    async with gateway([CALL]) as (http, _, _, _):
        assert messages_of(await chat(http, USER))[0]["content"] == CALL


async def test_every_reply_has_call_ids():
    async with gateway([CALL * 2] * 3) as (http, _, _, _):
        talks = [[USER], [USER], [USER, USER]]
        replies = [messages_of(await chat(http, *talk, tools=[TOOL]))[0] for talk in talks]
        assert len({call["id"] for reply in replies for call in reply["tool_calls"]}) == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "multiply"}}])
async def test_requested_call_is_begun_in_the_prompt(choice, stream):
    rest = '{"a": 6}}\n</tool_call>' if isinstance(choice, dict) else 'multiply", "arguments": {"a": 6}}\n</tool_call>'
    async with gateway([rest, "42."]) as (http, engine, bench, session):
        (message,) = messages_of(await chat(http, USER, tools=[TOOL], tool_choice=choice, stream=stream))
        assert (message["content"], message["tool_calls"][0]["function"]["name"]) == (None, "multiply")
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
        await chat(http, USER, message, result, tools=[TOOL])
        attempt = await bench.attempt(session)
        assert "assistant\n<tool_call>\n" in renderer().tokenizer.decode(engine.prompts[0])
        assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
        assert [node.parent for node in attempt.nodes] == [None, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_logprobs_are_given_on_request(stream):
    async with gateway(["é 42"]) as (http, engine, bench, session):
        answer = await chat(http, USER, return_token_ids=True, logprobs=True, stream=stream)
        step = (await bench.attempt(session)).steps[0]
        events = [answer.json()] if not stream else [e for e in events_of(answer) if isinstance(e, dict)]
        assert [i for e in events for i in e.get("prompt_token_ids", ())] == list(engine.prompts[0])
        choices = [choice for event in events for choice in event["choices"]]
        assert [i for c in choices for i in c.get("token_ids", ())] == list(step.completion_ids)
        reported = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert [entry["logprob"] for entry in reported] == pytest.approx(step.logprobs)
        assert b"".join(bytes(entry["bytes"]) for entry in reported).decode() == "é 42<|im_end|>"


async def test_unknown_fields_pass_and_are_counted():
    async with gateway(["a", "b"]) as (http, _, bench, _):
        for _ in range(2):
            assert (await chat(http, USER, wild_idea=1, user="ann", parallel_tool_calls=True)).status_code == 200
        assert bench.gateway.counts == {"ignored:wild_idea": 2}


BAD = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0].content[0].image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "picture"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"seed": 10**30}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": "all"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "divide"}}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}}, "response_format"),
    ({"tools": [STRICT]}, "tools"),
    ({"tools": [STRICT], "tool_choice": "required"}, "tools"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"logit_bias": {"one": 100}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_logprobs": 50}, "top_logprobs"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"functions": [{}]}, "functions[0]"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_what_cannot_be_honoured_is_refused_by_name(fields, param):
    async with gateway([]) as (http, engine, _, _):
        response = await chat(http, **{"messages": [USER]} | fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert response.headers["x-should-retry"] == "false"
        assert engine.prompts == []


def nested(depth):
    value = {"type": "object"}
    for _ in range(depth):
        value = {"properties": {"x": value}}
    return value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x", "name": "\\udfff"}]}',
        b"[" * 100_000,
        b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"messages": NaN}',
    ],
)
async def test_a_malformed_body_is_a_400(body):
    async with gateway([]) as (http, _, _, _):
        response = await http.post("/v1/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("depth", [40, 100, 400])
async def test_deeply_nested_schemas_are_served_or_refused_never_500(depth):
    async with gateway(["x"]) as (http, _, _, _):
        tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
        response = await chat(http, USER, tools=[tool])
        assert response.status_code in (200, 400)


@pytest.mark.parametrize("content", ["\x00", "\ufffe", "a" * 100_000, "e\u0301" * 100, "<|im_start|>" * 50])
async def test_odd_text_is_served_and_recorded_as_it_is(content):
    async with gateway(["x"]) as (http, engine, bench, session):
        assert (await chat(http, {"role": "user", "content": content})).status_code == 200
        assert (await bench.attempt(session)).nodes[0].messages[0]["content"] == content
        assert content in renderer().tokenizer.decode(engine.prompts[0])


@pytest.mark.parametrize(("room", "status"), [(-1, 400), (0, 400), (1, 200)])
async def test_a_prompt_over_the_context_is_refused_not_cut(room, status):
    size = len(renderer().root([USER]))
    async with gateway(["a long answer"]) as (http, engine, bench, session):
        engine.context_length = size + room
        response = await chat(http, USER)
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert (await bench.attempt(session)).steps == ()


async def test_a_reply_may_fill_the_context_and_no_more():
    async with gateway(["a long answer, longer than three tokens"]) as (http, engine, bench, _):
        engine.context_length = len(renderer().root([USER])) + 3
        answer = (await chat(http, USER)).json()
        assert (engine.samplings[0].max_tokens, answer["choices"][0]["finish_reason"]) == (3, "length")
        assert bench.gateway.counts == {"capped:max_tokens": 1, "finish:length": 1}


async def test_a_reply_cut_after_a_whole_call_says_length():
    call_ids = renderer().tokenizer.encode(CALL)
    async with gateway([CALL]) as (http, _, _, _):
        (choice,) = (await chat(http, USER, tools=[TOOL], max_tokens=len(call_ids))).json()["choices"]
        assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("length", 1)


async def test_a_body_over_the_limit_is_a_413():
    async with gateway([], limits=GatewayLimits(body_bytes=1000)) as (http, _, _, _):
        response = await chat(http, {"role": "user", "content": "x" * 2000})
        assert response.status_code == 413


def test_messages_that_the_template_refuses_are_a_400():
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('not this') }}{% endif %}{{ messages[0].content }}"

    async def main():
        model = renderer(template=template)
        async with workbench(ScriptedEngine([], model.tokenizer), model) as bench:
            session = await bench.rollout()
            response = await chat(bench.http(session.token), {"role": "user", "content": "bad"})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_messages")
            assert "not this" in response.json()["error"]["message"]

    asyncio.run(main())


async def test_transcripts_are_named_by_their_header():
    async with gateway(["a", "b"]) as (http, _, bench, session):
        await chat(http, USER, headers={"x-sample-id": "planner"})
        await chat(http, USER)
        assert [step.transcript for step in (await bench.attempt(session)).steps] == ["planner", "main"]


async def test_a_rollout_header_that_contradicts_the_token_is_refused():
    async with gateway([]) as (http, _, _, _):
        response = await chat(http, USER, headers={"x-rollout-id": "train-9.0.1"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "rollout_mismatch")


def test_a_template_that_rewrites_history_opens_counted_roots():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + (' last' if loop.last else '') + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )

    async def main():
        model = renderer(template=template)
        async with workbench(ScriptedEngine(["one", "two"], model.tokenizer), model) as bench:
            session = await bench.rollout()
            http = bench.http(session.token)
            await chat(http, USER)
            await chat(http, USER, {"role": "assistant", "content": "one"}, USER)
            assert [node.parent for node in (await bench.attempt(session)).nodes] == [None, None]
            assert (await bench.pool.stats()).breaks == {"template_rewrites_history": 1}

    asyncio.run(main())


def test_rollouts_that_begin_with_the_same_examples_share_one_rendering(monkeypatch):
    model, rendered = renderer(), []
    plain = model.root

    def counted(messages, tools=()):
        rendered.append(messages)
        return plain(messages, tools)

    def examples(**details):
        return USER, {"role": "assistant", "content": "one", **details}, USER

    async def main():
        engine = ScriptedEngine(["two"] * 6, model.tokenizer)
        async with workbench(engine, model) as bench:
            sessions = [await bench.rollout(f"train-{number}") for number in range(4)]
            for session in sessions[:3]:
                await chat(bench.http(session.token), *examples())
            assert len(rendered) == 1
            assert engine.prompts[0] == engine.prompts[1] == engine.prompts[2]
            # a reply that differs in what its digest leaves out is another conversation
            await chat(bench.http(sessions[3].token), *examples(reasoning_content="because"))
            assert len(rendered) == 2
            # a later call that starts again is rendered, and is not kept
            edited = ({"role": "user", "content": "another"}, *examples())
            for _ in range(2):
                await chat(bench.http(sessions[0].token), *edited)
            assert len(rendered) == 4

    monkeypatch.setattr(model, "root", counted)
    asyncio.run(main())


async def test_a_closed_rollout_gets_409_with_its_end():
    async with gateway([]) as (http, engine, bench, session):
        bench.gateway.close(session.rollout_id)
        late = await chat(http, USER)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "rollout_ended")
        assert late.headers["x-should-retry"] == "false"
        await bench.pool.end(session.rollout_id, End.TIMEOUT)
        async with workbench(engine, renderer(), pool=bench.pool) as other:
            late = await chat(other.http(session.token), USER)
            assert (late.status_code, "timeout" in late.text) == (409, True)


async def test_rollout_of_another_gateway_is_taken_over():
    async with gateway(["one", "two"]) as (http, engine, bench, session):
        await chat(http, USER)
        async with workbench(engine, renderer(), pool=bench.pool, sampling={"train": Sampling(temperature=0.5)}) as other:
            await chat(other.http(session.token), USER, {"role": "assistant", "content": "one"}, USER)
        attempt = await bench.attempt(session)
        assert [node.parent for node in attempt.nodes] == [None, 0]
        assert attempt.steps[1].sampling.temperature == 0.5


async def test_a_gateway_whose_rollout_was_taken_over_catches_up():
    async with gateway([str(i) for i in range(9)]) as (http, engine, bench, session):
        talk = [USER]
        async with workbench(engine, renderer(), pool=bench.pool) as other:
            for each in (http, other.http(session.token), http, http):
                response = await chat(each, *talk)
                if response.status_code == 503:  # its graph was out of date: the client tries again
                    response = await chat(each, *talk)
                talk += [messages_of(response)[0], USER]
        attempt = await bench.attempt(session)
        assert [node.parent for node in attempt.nodes] == [None, 0, 1, 2]


async def test_models_and_health_say_what_is_served():
    async with gateway([]) as (http, engine, bench, _):
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "scripted"
        await engine.swap(7, lambda: None)
        assert (await bench.http().get("/health")).json() == {
            "status": "ok",
            "model": "scripted",
            "policy_version": 7,
            "rollouts": 1,
        }


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigError, match="16"):
        Gateway(ScriptedEngine([], renderer().tokenizer), renderer(), memory_pool(), secret=b"short")


async def test_an_empty_reply_is_a_step():
    async with gateway([ScriptedReply(ids=())]) as (http, _, bench, session):
        assert messages_of(await chat(http, USER))[0]["content"] == ""
        (step,) = (await bench.attempt(session)).steps
        assert (step.completion_ids, step.finish) == ((), "stop")


def test_tokens_carry_the_version_that_sampled_them():
    async def main():
        engine = ScriptedEngine([ScriptedReply("abcdef", stall_after=3)], renderer(merges=False).tokenizer)
        async with workbench(engine, renderer(merges=False)) as bench:
            session = await bench.rollout()
            async with asyncio.TaskGroup() as group:
                group.create_task(chat(bench.http(session.token), USER))
                await asyncio.wait_for(engine.stalled.wait(), 10)
                await engine.swap(1, lambda: None)
                engine.release()
            assert (await bench.attempt(session)).steps[0].versions == (0, 0, 0, 1, 1, 1, 1)

    asyncio.run(main())
