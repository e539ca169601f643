import asyncio

import openai
import pytest
from gateway_cases import renderer

from penstock.gateway.graph import prompts
from penstock.testing import ScriptedEngine, ScriptedReply, workbench

ASKED = "6 times 7 is"


def run(script, steps, **options):
    """Run `steps(client, engine, bench, session)` with a real client of a gateway whose engine plays `script`."""

    async def main():
        engine = ScriptedEngine(script, renderer().tokenizer)
        async with workbench(engine, renderer(), **options) as bench:
            session = await bench.rollout()
            return await steps(bench.openai(session), engine, bench, session)

    return asyncio.run(main())


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_reaches_the_engine_without_a_template(as_ids):
    async def steps(client, engine, bench, session):
        ids = renderer().tokenizer.encode(ASKED)
        answer = await client.completions.create(model="any", prompt=ids if as_ids else ASKED, max_tokens=50)
        assert engine.prompts == [tuple(ids)]
        (step,) = (await bench.attempt(session)).steps
        assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.id) == (" 42.", "stop", f"cmpl-{step.answer}")
        assert answer.usage.completion_tokens == len(step.completion_ids)

    run([" 42."], steps)


def test_markup_is_text_here():
    async def steps(client, engine, bench, session):
        answer = await client.completions.create(model="any", prompt=ASKED)
        assert answer.choices[0].text == "<think>x</think><tool_call>{}</tool_call>"

    run(["<think>x</think><tool_call>{}</tool_call>"], steps)


def test_a_stream_adds_up_and_token_ids_are_those_recorded():
    async def steps(client, engine, bench, session):
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

    run([" forty-two", " 42."], steps)


def test_a_prompt_that_holds_the_reply_goes_on_token_by_token():
    async def steps(client, engine, bench, session):
        first = await client.completions.create(model="any", prompt=ASKED, stop="\n")
        asked = f"{ASKED}{first.choices[0].text}\nand 7 times 6 is"
        await client.completions.create(model="any", prompt=asked)
        attempt = await bench.attempt(session)
        known = prompts(attempt)
        assert all(known[step.index] == prompt for step, prompt in zip(attempt.steps, engine.prompts, strict=True))

    run([" 42.\nSo", " 42 too."], steps)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_goes_on_from_the_longest_of_many_paths(as_ids):
    async def steps(client, engine, bench, session):
        write = renderer().tokenizer.encode if as_ids else str

        async def told(prompt):
            answer = await client.completions.create(model="any", prompt=prompt)
            step = (await bench.attempt(session)).steps[-1]
            return [*prompt, *step.completion_ids] if as_ids else prompt + answer.choices[0].text

        first = await told(write(ASKED))
        longer = await told(first + write(" And"))
        await told(write("Another beginning"))
        await told(first + write(" Or"))
        await told(longer + write(" then"))
        assert [node.parent for node in (await bench.attempt(session)).nodes] == [None, 0, None, 0, 1]

    run([" 42.", " more.", " too.", " not.", " end."], steps)


def test_the_prompt_can_be_repeated_and_the_text_ends_before_a_stop_string():
    async def steps(client, engine, bench, session):
        answer = await client.completions.create(model="any", prompt=ASKED, echo=True, stop=["."])
        assert answer.choices[0].text == "6 times 7 is 42"

    run([" 42. So"], steps)


def test_text_reaches_the_client_while_the_engine_is_still_sampling():
    async def steps(client, engine, bench, session):
        seen = ""
        async for event in await client.completions.create(model="any", prompt=ASKED, stream=True):
            seen += event.choices[0].text
            if seen:
                engine.release()
        assert seen == " It is 42."

    run([ScriptedReply(" It is 42.", stall_after=1)], steps, serves=True)


@pytest.mark.parametrize("asked", [{"prompt": ["a", "b"]}, {"prompt": "a", "suffix": "b"}, {"prompt": "a", "logprobs": 30}])
def test_what_is_not_offered_is_refused_by_name(asked):
    async def steps(client, engine, bench, session):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(model="any", **asked)
        assert refusal.value.param in asked
        assert engine.prompts == []

    run([], steps)
