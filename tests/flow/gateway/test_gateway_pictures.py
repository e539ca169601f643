"""Pictures that the engine's model sees: a vLLM double that answers as a real server with the tiny model of pictures did."""

import asyncio
import dataclasses
import logging
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from tiny_vision import BLUE, RED, image, url_of, write_vision_tokenizer

from faults.upstream_cases import PICTURE_MARK, PICTURES, FakeVllm, edited, engine_over, picture_tokens
from penstock.chat.renderer import Renderer
from penstock.errors import EngineError, EngineRefused
from penstock.gateway.prompt import PictureReader
from penstock.pool.rows import PictureStore
from penstock.testing import workbench
from penstock.train.sequences import exactness, read_graph, why_untrainable

LINE = "[image omitted: this model reads text only]"


class Talk:
    """A rollout before the double, with a conversation that grows."""

    def __init__(self, bench, session, server):
        self.bench, self.session, self.server = bench, session, server
        self.messages = []

    async def say(self, content, role="user", **fields):
        self.messages.append({"role": role, "content": content, **fields})
        client = self.bench.openai(self.session)
        answer = await client.chat.completions.create(model="any", messages=self.messages, max_tokens=4, seed=1)
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return answer

    @property
    def counts(self):
        return {name: count for name, count in self.bench.gateway.counts.items() if name != "finish:length"}

    async def attempt(self):
        return await self.bench.attempt(self.session)


@asynccontextmanager
async def gateway(tmp_path, *, sees=True, version="0.32.0", edit=None, template=None):
    write_vision_tokenizer(tmp_path / "model")
    if template:
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    server = FakeVllm(version=version)
    server.sees_pictures, server.vocabulary = sees, 1000
    if edit:
        server.otherwise = dataclasses.replace(server.otherwise, edit=edit)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        engine = await stack.enter_async_context(engine_over(server, folder=tmp_path / "model"))
        renderer = Renderer.load(tmp_path / "model")
        bench = await stack.enter_async_context(workbench(engine, renderer, pictures=tmp_path / "run"))
        yield Talk(bench, await bench.rollout(), server)


async def test_picture_is_recorded_by_digest_and_tokens(tmp_path):
    async with gateway(tmp_path) as talk:
        await talk.say([{"type": "text", "text": "See <image>:"}, image(RED)])
        [asked], attempt = talk.server.requests, await talk.attempt()
        [node] = attempt.nodes
        [picture] = node.pictures
        assert asked["content_parts"] == [{"type": "image_url", "url": url_of(RED)}]
        assert asked["token_ids"].count(PICTURE_MARK) == 1  # what the user wrote is text
        assert list(node.token_ids[picture.first : picture.first + picture.size]) == picture_tokens(url_of(RED))
        sent = [*node.token_ids[: picture.first], picture.token, *node.token_ids[picture.first + picture.size :]]
        assert sent == asked["token_ids"]
        assert PictureStore(tmp_path / "run").read(picture.digest) == RED
        assert node.messages[0]["content"][1] == {"type": "picture", "digest": picture.digest, "media_type": "image/png"}
        assert talk.counts == {}


async def test_tokens_after_the_first_picture_are_masked(tmp_path):
    async with gateway(tmp_path) as talk:
        first = await talk.say("Hello.")
        await talk.say([image(RED), {"type": "text", "text": "And this?"}])
        await talk.say("More.")
        last = await talk.say([image(BLUE), image(RED)])
        attempt = await talk.attempt()
        graph, rate = read_graph(attempt), exactness(attempt).rate
        assert [node.parent for node in attempt.nodes] == [None, 0, 1, 2] and rate == 1.0
        assert [why_untrainable(step, graph) for step in attempt.steps] == [None, *["picture_in_context"] * 3]
        assert [len(request.get("content_parts", [])) for request in talk.server.requests] == [0, 1, 1, 3]
        assert "prompt" in talk.server.requests[0]  # without pictures by the route of text
        assert last.usage.prompt_tokens > first.usage.prompt_tokens + 3 * len(picture_tokens(url_of(BLUE)))


async def test_another_picture_is_another_path_and_same_one_same(tmp_path):
    async with gateway(tmp_path) as talk:
        await talk.say([image(RED)])
        talk.messages.clear()
        await talk.say([image(RED)])
        talk.messages.clear()
        await talk.say([image(BLUE)])
        attempt = await talk.attempt()
        assert [step.node for step in attempt.steps] == [0, 0, 1]


async def test_picture_in_tool_result_is_seen_inside_of_it(tmp_path):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    async with gateway(tmp_path) as talk:
        talk.messages += [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        await talk.say([{"type": "text", "text": "Here:"}, image(BLUE)], role="tool", tool_call_id="call_1")
        [node] = (await talk.attempt()).nodes
        [picture] = node.pictures
        before, after = node.token_ids[: picture.first], node.token_ids[picture.first + picture.size :]
        decode = Renderer.load(tmp_path / "model").tokenizer.decode
        assert decode(before).endswith("<tool_response>\nHere:") and decode(after).startswith("\n</tool_response>")


@pytest.mark.parametrize(
    ("sees", "version", "part"),
    [
        (False, "0.32.0", image(RED)),
        (True, "0.29.0", image(RED)),  # it would not tell the prompt that it made
        (True, "0.32.0", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        (True, "0.32.0", {"type": "image_url", "image_url": {"url": "http://pictures.example/a.png"}}),
    ],
)
async def test_picture_that_server_does_not_take_is_counted_line(tmp_path, sees, version, part):
    async with gateway(tmp_path, sees=sees, version=version) as talk:
        await talk.say("Hello.")
        await talk.say([{"type": "text", "text": "See:"}, part])
        attempt = await talk.attempt()
        assert attempt.nodes[1].messages[0]["content"] == f"See:\n{LINE}"
        assert talk.counts == {"placeholder:image": 1} and attempt.nodes[1].pictures == ()
        assert [why_untrainable(step, read_graph(attempt)) for step in attempt.steps] == [None, None]


async def test_template_without_pictures_gets_a_line(tmp_path, caplog):
    numbered = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    with caplog.at_level(logging.WARNING):
        async with gateway(tmp_path, template=numbered) as talk:
            await talk.say([{"type": "text", "text": "See:"}, image(RED)])
            assert talk.counts == {"placeholder:image": 1}
    assert "otherwise than the chat template" in caplog.text


async def test_a_reply_after_another_prompt_than_ours_is_not_recorded(tmp_path):
    def other(events):
        return [events[0].replace(b'"prompt_token_ids": [257', b'"prompt_token_ids": [256'), *events[1:]]

    async with gateway(tmp_path, edit=other) as talk:
        answer = await talk.bench.http(talk.session.token).post(
            "/v1/chat/completions", json={"model": "any", "messages": [{"role": "user", "content": [image(RED)]}], "max_tokens": 4}
        )
        assert answer.status_code == 502 and "otherwise than when it was asked" in answer.text
        assert (await talk.attempt()).steps == ()


async def test_picture_after_sampled_token_that_stands_for_one_is_rejected(tmp_path):
    async with gateway(tmp_path, edit=edited(1, token_ids=[PICTURE_MARK])) as talk:
        await talk.say("Hello.")
        talk.messages.append({"role": "user", "content": [image(RED)]})
        answer = await talk.bench.http(talk.session.token).post(
            "/v1/chat/completions", json={"model": "any", "messages": talk.messages, "max_tokens": 4}
        )
        assert answer.status_code == 400 and f"token {PICTURE_MARK} stands for a picture" in answer.text


async def test_pictures_of_earlier_answer_are_seen_again_by_their_digest(tmp_path):
    async with gateway(tmp_path) as talk:
        http = talk.bench.http(talk.session.token)
        content = [{"type": "input_image", "image_url": url_of(RED)}]
        body = {"model": "any", "max_output_tokens": 16, "input": [{"role": "user", "content": content}]}
        first = (await http.post("/v1/responses", json=body)).json()
        body = {"model": "any", "max_output_tokens": 16, "input": "More.", "previous_response_id": first["id"]}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        attempt = await talk.attempt()
        assert [node.parent for node in attempt.nodes] == [None, 0] and len(talk.server.requests[1]["content_parts"]) == 1


def test_a_full_folder_of_pictures_takes_no_more_of_them(tmp_path):
    write_vision_tokenizer(tmp_path / "model")

    async def main():
        server = FakeVllm()
        server.sees_pictures, server.vocabulary = True, 1000
        async with server, engine_over(server, folder=tmp_path / "model") as engine:
            renderer = Renderer.load(tmp_path / "model")
            reader = PictureReader(engine, renderer, PictureStore(tmp_path, max_bytes=len(RED)))
            parts = [image(RED), image(BLUE)]
            kinds = [(await reader._read_part(part, {}))["type"] for part in parts]  # no call of a small gateway fills it
            assert kinds == ["picture", "image_url"]

    asyncio.run(main())


def test_the_double_answers_about_pictures_as_a_real_server_did(tmp_path):
    async def main():
        server = FakeVllm()
        server.sees_pictures = True
        async with server, engine_over(server) as engine:
            for entry in PICTURES.values():
                if "body" in entry and entry["status"] == 200 and "token_ids" in entry["body"]:
                    reported = await engine.client.http.request_bytes(server.url + "/inference/v1/generate", entry["body"])
                    assert prompts(reported.decode()) == prompts(entry["answer"])

    asyncio.run(main())


def prompts(stream):
    """What a stream says of its prompt, and the fields of its choices."""
    first = stream.partition("\n")[0].replace(" ", "")
    return first[first.index('"prompt_token_ids"') : first.index("]")], ['"token_ids"' in first, '"logprobs":{"content"' in first]


def test_pictures_need_servers_that_all_take_them():
    async def main():
        one, other = FakeVllm(), FakeVllm(version="0.29.0")
        one.sees_pictures = other.sees_pictures = True
        busy = iter([web.Response(status=503), web.Response(status=500)])

        async def cut(request):
            return next(busy, None) if request.path.endswith("/render") else None

        one.cut = cut
        async with one, other, engine_over(one, other) as both, engine_over(one) as engine:
            with pytest.raises(EngineRefused, match="--enable-scale-out"):
                await both.render_picture(url_of(RED))
            assert (await engine.render_picture(url_of(RED))).size == len(picture_tokens(url_of(RED)))
            assert next(busy, None) is None

    asyncio.run(main())


def test_absent_server_is_an_error_with_the_picture_kept(tmp_path):
    async def main():
        server = FakeVllm()
        server.sees_pictures = True
        async with engine_over(server) as engine:
            with pytest.raises(EngineError) as error:
                await engine.render_picture(url_of(RED))
            assert not isinstance(error.value, EngineRefused)

    asyncio.run(main())
