from contextlib import asynccontextmanager

import openai
import pytest
from gateway_cases import renderer

from penstock.gateway.graph import prompts
from penstock.testing import ScriptedEngine, ScriptedReply, workbench

ASKED = "6 times 7 is"


@asynccontextmanager
async def gateway(script, **options):
    """Yields client, engine, bench, session: a real client of a gateway whose engine plays `script`."""
    engine = ScriptedEngine(script, renderer().tokenizer)
    async with workbench(engine, renderer(), **options) as bench:
        session = await bench.rollout()
        yield bench.openai(session), engine, bench, session


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_reaches_the_engine_without_a_template(as_ids):
    async with gateway([" 42."]) as (client, engine, bench, session):
        ids = renderer().tokenizer.encode(ASKED)
        answer = await client.completions.create(model="any", prompt=ids if as_ids else ASKED, max_tokens=50)
        assert engine.prompts == [tuple(ids)]
        (step,) = (await bench.attempt(session)).steps
        assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.id) == (" 42.", "stop", f"cmpl-{step.answer}")
        assert answer.usage.completion_tokens == len(step.completion_ids)


async def test_markup_is_text_here():
    async with gateway(["<think>x</think><tool_call>{}</tool_call>"]) as (client, _, _, _):
        answer = await client.completions.create(model="any", prompt=ASKED)
        assert answer.choices[0].text == "<think>x</think><tool_call>{}</tool_call>"


async def test_a_stream_adds_up_and_token_ids_are_those_recorded():
    async with gateway([" forty-two", " 42."]) as (client, engine, bench, session):
        asked = {"n": 2, "stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
        texts, ids = {0: "", 1: ""}, {0: [], 1: []}
        async for event in await client.completions.create(model="any", prompt=ASKED, stream=True, **asked):
            for choice in event.choices:
                texts[choice.index] += choice.text
                ids[choice.index] += choice.token_ids
        attempt = await bench.attempt(session)
        assert texts == {0: " forty-two", 1: " 42."}
        assert sorted(ids.values()) == sorted(list(step.completion_ids) for step in attempt.steps)
        assert event.usage.prompt_tokens == len(engine.prompts[0])


async def test_prompt_that_holds_reply_continues_token_by_token():
    async with gateway([" 42.\nSo", " 42 too."]) as (client, engine, bench, session):
        first = await client.completions.create(model="any", prompt=ASKED, stop="\n")
        asked = f"{ASKED}{first.choices[0].text}\nand 7 times 6 is"
        await client.completions.create(model="any", prompt=asked)
        attempt = await bench.attempt(session)
        known = prompts(attempt)
        assert all(known[step.index] == prompt for step, prompt in zip(attempt.steps, engine.prompts, strict=True))


@pytest.mark.parametrize("as_ids", [False, True])
async def test_prompt_continues_from_longest_of_many_paths(as_ids):
    async with gateway([" 42.", " more.", " too.", " not.", " end."]) as (client, _, bench, session):
        write = renderer().tokenizer.encode if as_ids else str

        async def reported(prompt):
            answer = await client.completions.create(model="any", prompt=prompt)
            step = (await bench.attempt(session)).steps[-1]
            return [*prompt, *step.completion_ids] if as_ids else prompt + answer.choices[0].text

        first = await reported(write(ASKED))
        longer = await reported(first + write(" And"))
        await reported(write("Another beginning"))
        await reported(first + write(" Or"))
        await reported(longer + write(" then"))
        assert [node.parent for node in (await bench.attempt(session)).nodes] == [None, 0, None, 0, 1]


async def test_prompt_can_be_repeated_and_text_ends_before_stop_string():
    async with gateway([" 42. So"]) as (client, _, _, _):
        answer = await client.completions.create(model="any", prompt=ASKED, echo=True, stop=["."])
        assert answer.choices[0].text == "6 times 7 is 42"


async def test_text_reaches_the_client_while_the_engine_is_still_sampling():
    async with gateway([ScriptedReply(" It is 42.", stall_after=1)], serves=True) as (client, engine, _, _):
        seen = ""
        async for event in await client.completions.create(model="any", prompt=ASKED, stream=True):
            seen += event.choices[0].text
            if seen:
                engine.release()
        assert seen == " It is 42."


@pytest.mark.parametrize("asked", [{"prompt": ["a", "b"]}, {"prompt": "a", "suffix": "b"}, {"prompt": "a", "logprobs": 30}])
async def test_what_is_not_offered_is_refused_by_name(asked):
    async with gateway([]) as (client, engine, _, _):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(model="any", **asked)
        assert refusal.value.param in asked
        assert engine.prompts == []
