import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from gateway_cases import TOOL, USER, chat, events_of, messages_of, renderer
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.parsers.base import Text
from penstock.gateway.reply import ReplyText
from penstock.testing import ScriptedEngine, ScriptedReply, workbench

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'


@asynccontextmanager
async def gateway(script, **options):
    engine = ScriptedEngine(script, renderer().tokenizer)
    async with workbench(engine, renderer(), **options) as bench:
        session = await bench.rollout()
        yield bench, session, engine


async def test_stream_opens_with_role_and_ends_with_done():
    async with gateway(["It is 42."]) as (bench, session, engine):
        response = await chat(bench.http(session.token), USER, stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        first, *middle, last, usage, done = events_of(response)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == "It is 42."
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
        assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], len(engine.prompts[0]))
        assert done == "[DONE]"
        assert len({event["id"] for event in (first, *middle, last, usage)}) == 1


async def test_usage_is_not_streamed_unless_asked_for():
    async with gateway(["42."]) as (bench, session, _):
        assert all("usage" not in event for event in events_of(await chat(bench.http(session.token), USER, stream=True))[:-1])


REPLIES = ["", "42.", " é🙂\r\n", f"Hm.\n{CALL}\n{CALL}", "<tool_call>broken", f"{CALL} and then", "STOP", "so STOP it"]


@pytest.mark.parametrize("reply", REPLIES)
async def test_streamed_or_not_record_and_message_are_same(reply):
    async with gateway([reply, reply]) as (bench, session, _):
        http, options = bench.http(session.token), {"tools": [TOOL], "stop": "STOP"}
        whole, streamed = await chat(http, USER, **options), await chat(http, USER, stream=True, **options)
        one, other = (await bench.attempt(session)).steps
        assert replace(other, index=0, seconds=one.seconds, answer=one.answer, created=one.created) == one
        assert messages_of(whole) == messages_of(streamed) == [one.message]
        assert whole.json()["choices"][0]["finish_reason"] == events_of(streamed)[-2]["choices"][0]["finish_reason"]


async def test_choices_are_streamed_side_by_side_and_each_is_whole():
    async with gateway(["first", "second"]) as (bench, session, _):
        response = await chat(bench.http(session.token), USER, stream=True, n=2)
        assert [m["content"] for m in messages_of(response)] == ["first", "second"]
        ends = [c["index"] for e in events_of(response)[:-1] for c in e["choices"] if c["finish_reason"]]
        assert sorted(ends) == [0, 1]


async def test_markup_that_becomes_a_call_is_never_shown_as_text():
    async with gateway([f"Let me see.\n{CALL}"]) as (bench, session, _):
        response = await chat(bench.http(session.token), USER, stream=True, tools=[TOOL])
        shown = [c["delta"].get("content") or "" for e in events_of(response)[:-1] for c in e["choices"]]
        assert "".join(shown) == "Let me see."


class Letters:
    """A decoder whose tokens are letters."""

    def push(self, ids):
        return "".join(map(chr, ids))

    def finish(self):
        return ""


words = st.text(alphabet="ab", min_size=1, max_size=3)


@given(said=st.text(alphabet="ab", max_size=12), stops=st.lists(words, min_size=1, max_size=3), size=st.integers(1, 5))
def test_text_ends_before_the_first_stop_string_to_be_completed(said, stops, size):
    text = ReplyText(Letters(), stops, None)
    shown, used = "", 0
    for start in range(0, len(said), size):
        taken, pieces = text.push([ord(letter) for letter in said[start : start + size]])
        shown, used = shown + "".join(piece.text for piece in pieces), used + taken
        if text.stopped:
            break
    shown += "".join(piece.text for piece in text.finish())
    ends = [end for end in range(len(said) + 1) if any(said[:end].endswith(stop) for stop in stops)]
    assert text.stopped == bool(ends)
    assert used == (ends[0] if ends else len(said))
    starts = [ends[0] - len(stop) for stop in stops if said[: ends[0]].endswith(stop)] if ends else [len(said)]
    assert shown == said[: min(starts)]


def test_a_stop_string_does_not_delay_what_cannot_be_one():
    text = ReplyText(Letters(), ["STOP"], None)
    assert text.push([ord("x")]) == (1, [Text("x")])
    assert text.push([ord("S")]) == (1, [])
    assert text.push([ord("o")]) == (1, [Text("So")])


async def test_text_reaches_real_client_while_engine_is_still_sampling():
    async with gateway([ScriptedReply("It is 42.", stall_after=1)], serves=True) as (bench, session, engine):
        stream = await bench.openai(session).chat.completions.create(model="any", messages=[USER], stream=True)
        seen = ""
        async for event in stream:
            seen += event.choices[0].delta.content or ""
            if seen:
                engine.release()
        assert seen == "It is 42."


async def test_a_real_openai_client_streams_tools_over_a_socket():
    async with gateway([f"Hm. {CALL}", "It is 42."], serves=True) as (bench, session, _):
        client = bench.openai(session, "executor")
        calls, text = {}, ""
        async for event in await client.chat.completions.create(model="any", messages=[USER], tools=[TOOL], stream=True):
            delta = event.choices[0].delta
            text += delta.content or ""
            for call in delta.tool_calls or ():
                begun = calls.setdefault(call.index, call)
                begun.function.arguments += "" if begun is call else call.function.arguments
        assert (text, calls[0].function.name, calls[0].function.arguments) == ("Hm.", "multiply", '{"a": 6}')
        reply = {"role": "assistant", "content": text, "tool_calls": [calls[0].model_dump(exclude={"index"})]}
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "42"}
        answer = await client.chat.completions.create(model="any", messages=[USER, reply, result], tools=[TOOL])
        assert answer.choices[0].message.content == "It is 42."
        attempt = await bench.attempt(session)
        assert [(step.index, step.transcript, step.node) for step in attempt.steps] == [(0, "executor", 0), (1, "executor", 1)]
        assert attempt.nodes[1].parent == 0


async def test_sub_agents_calling_at_once_keep_their_own_paths():
    async with gateway(lambda prompt: f"reply {len(prompt)}", serves=True) as (bench, session, _):

        async def agent(name):
            http, talk = bench.http(session.token), [{"role": "user", "content": name}]
            for _ in range(3):
                response = await chat(http, *talk, headers={"x-sample-id": name})
                talk += [messages_of(response)[0], USER]

        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(agent(name))
        attempt = await bench.attempt(session)
        assert [step.index for step in attempt.steps] == list(range(12))
        assert sum(node.parent is None for node in attempt.nodes) == 4
        for node in attempt.nodes:
            if node.parent is not None:
                names = {step.transcript for step in attempt.steps if step.node == node.id}
                assert names == {attempt.steps[node.parent].transcript}
