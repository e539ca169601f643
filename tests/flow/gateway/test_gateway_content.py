"""What clients send besides plain text: pictures, documents, deferred tools, begun replies, one call at a time."""

import base64
import re
from contextlib import asynccontextmanager

import orjson
import pytest
from gateway_cases import renderer

from penstock.chat.renderer import Renderer
from penstock.testing import CHATML, ScriptedEngine, workbench, write_tokenizer
from penstock.train.sequences import exactness

PIXEL = base64.b64encode(b"\x89PNG not really" * 100).decode()
NOTE = base64.b64encode("Grüße".encode()).decode()
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


class Talk:
    """A rollout before a scripted engine."""

    def __init__(self, bench, session, engine):
        self.bench, self.session, self.engine = bench, session, engine

    async def post(self, dialect, **body):
        limit = {"max_tokens": 100} if dialect == "messages" else {}
        answer = await self.bench.http(self.session.token).post(PATHS[dialect], json={"model": "any", **limit, **body})
        assert answer.status_code == 200, answer.text
        return answer

    @property
    def prompt(self):
        """The last prompt as text."""
        return self.engine.tokenizer.core.decode(self.engine.prompts[-1], skip_special_tokens=False)

    async def is_one_path(self):
        attempt = await self.bench.attempt(self.session)
        return [node.parent for node in attempt.nodes] == [None, *range(len(attempt.nodes) - 1)] and exactness(attempt).rate == 1.0


@asynccontextmanager
async def gateway(script, rendering=None):
    made = rendering or renderer(template=CHATML)
    engine = ScriptedEngine(script, made.tokenizer)
    async with workbench(engine, made) as bench:
        yield Talk(bench, await bench.rollout(), engine)


def results(dialect, call_id, parts):
    """A tool result with these parts, after the call that it answers; both in the dialect's form."""
    if dialect == "chat":
        call = {
            "role": "assistant",
            "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        }
        return {
            "messages": [{"role": "user", "content": "Look."}, call, {"role": "tool", "tool_call_id": call_id, "content": parts}]
        }
    if dialect == "messages":
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": call_id, "name": "look", "input": {}}]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": parts}]}
        return {"messages": [{"role": "user", "content": "Look."}, call, result]}
    call = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}
    return {
        "input": [{"role": "user", "content": "Look."}, call, {"type": "function_call_output", "call_id": call_id, "output": parts}]
    }


TOOLS = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [{"name": "look", "description": "Looks.", "input_schema": FUNCTION["parameters"]}],
}
IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
}
NOTES = {
    "chat": {"type": "file", "file": {"filename": "a.txt", "file_data": f"data:text/plain;base64,{NOTE}"}},
    "responses": {"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{NOTE}"},
    "messages": {"type": "document", "title": "a.txt", "source": {"type": "text", "media_type": "text/plain", "data": "Grüße"}},
}
TEXTS = {"chat": "text", "responses": "input_text", "messages": "text"}


@pytest.mark.parametrize("dialect", PATHS)
async def test_picture_in_tool_result_is_counted_placeholder_on_same_path(dialect):
    async with gateway([CALL, "Nice."]) as talk:
        key = "input" if dialect == "responses" else "messages"
        first = (await talk.post(dialect, **{key: [{"role": "user", "content": "Look."}]}, tools=TOOLS[dialect])).json()
        made = orjson.dumps(first).decode()
        call_id = made[made.index("call_") :].partition('"')[0]
        parts = [{"type": TEXTS[dialect], "text": "Here:"}, IMAGES[dialect], NOTES[dialect]]
        body = results(dialect, call_id, parts)
        await talk.post(dialect, **body, tools=TOOLS[dialect])
        assert "Here:\n[image omitted: this model reads text only]\n" in talk.prompt and "Grüße" in talk.prompt
        assert talk.bench.gateway.counts["placeholder:image"] == 1
        assert await talk.is_one_path()
        attempt = await talk.bench.attempt(talk.session)
        assert PIXEL not in str(attempt.nodes)


async def test_documents_and_search_results_keep_their_places():
    async with gateway(["Good."]) as talk:
        pdf = {"type": "document", "title": "b.pdf", "source": {"type": "base64", "media_type": "application/pdf", "data": PIXEL}}
        found = {"type": "search_result", "title": "T", "source": "http://x", "content": [{"type": "text", "text": "hit"}]}
        await talk.post("messages", messages=[{"role": "user", "content": [pdf, found]}])
        assert "[document b.pdf omitted: this model reads text only]\nT\nhttp://x\nhit" in talk.prompt
        assert talk.bench.gateway.counts == {"placeholder:document": 1}


SECOND = CALL + "\n" + CALL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
async def test_one_call_at_time_cuts_second_and_continues_from_first(dialect, stream):
    fields = (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        if dialect == "messages"
        else {"parallel_tool_calls": False}
    )
    async with gateway([SECOND, "Nice."]) as talk:
        key = "input" if dialect == "responses" else "messages"
        asked = [{"role": "user", "content": "Look."}]
        text = (await talk.post(dialect, **{key: asked}, tools=TOOLS[dialect], stream=stream, **fields)).text
        attempt = await talk.bench.attempt(talk.session)
        [call] = attempt.steps[0].message["tool_calls"]
        assert len({part.partition('"')[0] for part in text.split("call_")[1:] if part[:8].strip("0123456789abcdef") == ""}) == 1
        assert talk.bench.gateway.counts["cut:parallel_tool_calls"] == 1 and attempt.steps[0].finish == "stop"
        assert talk.engine.tokenizer.decode(attempt.steps[0].completion_ids).strip() == CALL
        await talk.post(dialect, **results(dialect, call["id"], "seen"), tools=TOOLS[dialect])
        assert await talk.is_one_path()


@pytest.mark.parametrize("stream", [False, True])
async def test_reply_continues_from_what_caller_began_and_conversation_from_both(stream):
    async with gateway([" 42.", "Yes."]) as talk:
        asked = [{"role": "user", "content": "6 times 7?"}, {"role": "assistant", "content": "The answer is"}]
        answer = await talk.post("messages", messages=asked, stream=stream)
        assert "".join(re.findall(r'"text":"(.*?)"', answer.text)) == " 42."
        assert talk.prompt.endswith("<|im_start|>assistant\nThe answer is")
        said = [*asked[:1], {"role": "assistant", "content": "The answer is 42."}, {"role": "user", "content": "Sure?"}]
        await talk.post("messages", messages=said)
        assert await talk.is_one_path()


async def test_chat_continues_the_final_message_on_request():
    async with gateway([" 42."]) as talk:
        asked = [{"role": "user", "content": "6 times 7?"}, {"role": "assistant", "content": "It is"}]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        answer = (await talk.post("chat", messages=asked, **options)).json()
        assert answer["choices"][0]["message"]["content"] == " 42." and talk.prompt.endswith("assistant\nIt is")


OPTIONAL = "{% if mood is defined %}[{{ mood }}]{% endif %}" + CHATML


async def test_variables_for_chat_template_reach_it_and_path_continues(tmp_path):
    rendering = Renderer.load(write_tokenizer(tmp_path, template=OPTIONAL))
    async with gateway(["Hi.", "Yes.", "Hi."], rendering) as talk:
        asked = [{"role": "user", "content": "Hello"}]
        await talk.post("chat", messages=asked, chat_template_kwargs={"mood": "glad"})
        assert "[glad]" in talk.prompt
        said = [*asked, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"}]
        await talk.post("chat", messages=said, chat_template_kwargs={"mood": "glad"})
        assert talk.prompt.startswith("[glad]") and await talk.is_one_path()
        await talk.post("chat", messages=asked)
        assert "[glad]" not in talk.prompt


async def test_deferred_tool_is_shown_and_the_path_continues():
    search = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {}}}
    later = {"name": "look", "description": "Looks far.", "input_schema": FUNCTION["parameters"], "defer_loading": True}
    hold = later | {"name": "DeferredToolPlaceholder", "description": "Reserved."}
    asked = [{"role": "user", "content": "Look."}]
    async with gateway([CALL.replace("look", "ToolSearch"), CALL]) as talk:
        first = (await talk.post("messages", messages=asked, tools=[search, hold])).json()
        assert "ToolSearch" in talk.prompt and "Reserved." not in talk.prompt
        [use] = first["content"]
        found = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "tool_reference", "tool_name": "look"}]}
        history = [*asked, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [found]}]
        second = (await talk.post("messages", messages=history, tools=[search, hold, later])).json()
        assert "Looks far." in talk.prompt and [block["name"] for block in second["content"]] == ["look"]
        assert await talk.is_one_path() and not [name for name in talk.bench.gateway.counts if name.startswith("ignored")]


async def test_with_the_vendors_own_search_all_tools_are_offered():
    later = TOOLS["messages"][0] | {"defer_loading": True}
    hosted = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    async with gateway(["Hm."]) as talk:
        await talk.post("messages", messages=[{"role": "user", "content": "Look."}], tools=[hosted, later])
        assert "Looks." in talk.prompt
        assert talk.bench.gateway.counts == {"ignored:tool:tool_search_tool_regex_20251119": 1}


async def test_what_a_vendors_servers_did_is_left_out_and_counted():
    async with gateway(["Hi.", "So."]) as talk:
        search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}
        sealed = {"type": "compaction", "encrypted_content": "xyz"}
        await talk.post("responses", input=[sealed, {"role": "user", "content": "Hi"}, search])
        used = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}}
        result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
        blocks = [used, result, {"type": "text", "text": "Found."}]
        history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": blocks}, {"role": "user", "content": "So?"}]
        await talk.post("messages", messages=history)
        names = ("item:compaction", "item:web_search_call", "block:server_tool_use", "block:web_search_tool_result")
        assert talk.bench.gateway.counts == {f"ignored:{name}": 1 for name in names}
        assert "xyz" not in talk.prompt and "Found." in talk.prompt


@pytest.mark.parametrize(("mode", "forces"), [("auto", False), ("required", True)])
async def test_allowed_tools_force_call_if_they_must_and_bind_reply(mode, forces):
    async with gateway([CALL if not forces else "{}}\n</tool_call>"]) as talk:
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "look"}]}
        await talk.post("responses", input="Look.", tools=TOOLS["responses"], tool_choice=allowed)
        assert talk.prompt.rstrip().endswith("assistant") is not forces
        [step] = (await talk.bench.attempt(talk.session)).steps
        assert step.sampling.grammar is not None and not talk.bench.gateway.counts


async def test_allowed_tools_that_are_not_offered_are_counted():
    async with gateway([CALL]) as talk:
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "image_generation"}]}
        await talk.post("responses", input="Look.", tools=TOOLS["responses"], tool_choice=allowed)
        assert talk.bench.gateway.counts == {"ignored:tool_choice.allowed_tools": 1}


async def test_response_can_be_read_again_by_id_in_rollout():
    async with gateway([CALL]) as talk:
        first = (await talk.post("responses", input="Look.", tools=TOOLS["responses"])).json()
        http = talk.bench.http(talk.session.token)
        again = (await http.get(f"/v1/responses/{first['id']}")).json()
        same = ("id", "status", "output", "usage", "created_at", "model", "completed_at")
        assert {name: again[name] for name in same} == {name: first[name] for name in same}
        assert (await http.get("/v1/responses/resp_unknown")).status_code == 404
        other = await talk.bench.rollout("train-1")
        assert (await talk.bench.http(other.token).get(f"/v1/responses/{first['id']}")).status_code == 404
