"""What endpoints are asked, and how their events are read."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import make_config
from penstock.engines import ENGINES, SECTIONS
from penstock.engines.text_endpoints.anthropic import AnthropicEndpoint, AnthropicReader, AnthropicSection
from penstock.engines.text_endpoints.base import ArgumentsPart, ReasoningPart, TextPart, TextRequest, ToolCallPart
from penstock.engines.text_endpoints.openai import OpenAIEndpoint, OpenAIReader, OpenAISection
from penstock.errors import ConfigError, RequestError
from penstock.http.client import UpstreamError
from penstock.records import Sampling, Usage
from penstock.system.packages import install_command

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "add", "arguments": "oops"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "tool", "tool_call_id": "b", "content": "no"},
    {"role": "user", "content": "Well?"},
]


def asked(**fields) -> TextRequest:
    return TextRequest(messages=TALK, tools=[TOOL], **({"sampling": Sampling(max_tokens=5)} | fields))


def openai(**fields) -> OpenAIEndpoint:
    return OpenAIEndpoint("far", OpenAISection(name="openai", api_key_env="", **fields))


def anthropic(**fields) -> AnthropicEndpoint:
    return AnthropicEndpoint("far", AnthropicSection(name="anthropic", api_key_env="", **fields))


def test_openai_is_asked_with_the_history_and_without_its_reasoning():
    body = openai(url="http://a:1/v1").body(asked())
    assert (body["max_tokens"], body["tool_choice"], body["tools"]) == (5, "auto", [TOOL])
    assert "temperature" not in body and "reasoning_content" not in body["messages"][2]
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "tool", "tool", "user"]


@pytest.mark.parametrize(
    ("fields", "of_openai", "of_anthropic"),
    [
        ({"may_call": False}, "none", {"type": "none"}),
        ({"forced": ""}, "required", {"type": "any"}),
        ({"forced": "add"}, {"type": "function", "function": {"name": "add"}}, {"type": "tool", "name": "add"}),
    ],
)
def test_a_choice_of_tools_is_said_in_each_ones_words(fields, of_openai, of_anthropic):
    assert openai().body(asked(**fields))["tool_choice"] == of_openai
    assert anthropic().body(asked(**fields))["tool_choice"] == of_anthropic


def test_allowed_tools_are_named_or_all_offered():
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    request = TextRequest(messages=TALK, tools=[TOOL, other], sampling=Sampling(max_tokens=5), allowed=frozenset({"add"}))
    listed = [{"type": "function", "function": {"name": "add"}}]
    assert openai().body(request)["tool_choice"] == {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
    assert [tool["name"] for tool in anthropic().body(request)["tools"]] == ["add"]


def test_the_vendor_gets_the_newer_name_of_the_limit():
    assert openai().body(asked())["max_completion_tokens"] == 5


def test_anthropic_is_asked_in_turns_with_results_before_next_question():
    body = anthropic().body(asked(sampling=Sampling(max_tokens=5, temperature=0.0, top_k=4, stop=("X",))))
    assert (body["system"], body["max_tokens"], body["stop_sequences"]) == ("Be brief.", 5, ["X"])
    assert (body["temperature"], body["top_k"]) == (0.0, 4)
    assert body["tools"] == [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
    first, calls, results = body["messages"]
    assert first == {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}
    assert [block["input"] for block in calls["content"]] == [{"x": 1}, {"unparsed": "oops"}]
    assert [block["type"] for block in results["content"]] == ["tool_result", "tool_result", "text"]


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(min_p=0.1)])
def test_what_anthropic_has_no_word_for_is_left_out(sampling):
    assert anthropic().body(asked(sampling=sampling)) == anthropic().body(asked(sampling=Sampling()))


def test_pictures_and_documents_reach_anthropic_in_its_own_form():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    paper = {"type": "file", "file": {"file_data": "data:application/pdf;base64,BBBB"}}
    said = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, picture, paper]}]
    blocks = anthropic().body(TextRequest(messages=said, sampling=Sampling()))["messages"][0]["content"]
    assert [block["type"] for block in blocks] == ["text", "image", "document"]
    assert blocks[1]["source"] == {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def test_one_call_at_a_time_is_requested():
    one = replace(asked(), one_call=True)
    assert anthropic().body(one)["tool_choice"]["disable_parallel_tool_use"] is True
    assert openai().body(one)["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("kind", "url", "at"),
    [
        (OpenAIEndpoint, "http://a:1", "http://a:1/v1"),
        (OpenAIEndpoint, "http://a:1/v1/", "http://a:1/v1"),
        (OpenAIEndpoint, "https://a/v1beta/openai", "https://a/v1beta/openai"),
        (OpenAIEndpoint, "", "https://api.openai.com/v1"),
        (AnthropicEndpoint, "http://a:1/v1", "http://a:1/v1"),
        (AnthropicEndpoint, "", "https://api.anthropic.com/v1"),
    ],
)
def test_an_address_is_taken_as_the_vendors_clients_take_it(kind, url, at):
    section = OpenAISection if kind is OpenAIEndpoint else AnthropicSection
    assert kind.base(section(name="x", url=url)) == at


@pytest.mark.parametrize("url", ["a:1", "ftp://a", "http://user:pass@a", "http://a/?key=1"])
def test_what_is_no_plain_address_is_refused(url):
    with pytest.raises(ConfigError, match=r"engine\.url"):
        openai(url=url)


def events(reader, *given: dict) -> list:
    for each in given:
        reader.feed(json.dumps(each).encode())
    heard = reader.take_chunk()
    return [] if heard is None else list(heard.parts)


def delta(**fields) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def test_calls_of_a_chat_are_distinguished_by_place_or_id():
    part = {"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x"'}}
    reader = OpenAIReader()
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    other = {"index": 1, "id": "b", "function": {"name": "sub", "arguments": ""}}
    same_place = {"index": 1, "id": "c", "function": {"name": "mul", "arguments": "{}"}}
    parts = events(reader, delta(tool_calls=[part]), delta(tool_calls=[more]), delta(tool_calls=[other, same_place]))
    assert parts == [
        ToolCallPart("a", "add"),
        ArgumentsPart('{"x"'),
        ArgumentsPart(": 1}"),
        ToolCallPart("b", "sub"),
        ToolCallPart("c", "mul"),
        ArgumentsPart("{}"),
    ]


def test_a_chat_ends_after_its_counts_whatever_comes_later():
    reader = OpenAIReader()
    assert events(reader, delta(reasoning="hm", content="4")) == [ReasoningPart("hm"), TextPart("4")]
    reader.feed(json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]}).encode())
    assert not reader.done
    reader.feed(json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}).encode())
    reader.feed(b"[DONE]")
    reader.feed(b"nonsense")
    heard = reader.take_chunk()
    assert heard is not None and (heard.finish, heard.usage) == ("length", Usage(prompt_tokens=3, completion_tokens=1))


def test_message_is_read_block_by_block_and_cached_tokens_count():
    reader = AnthropicReader()
    used = {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 1}
    parts = events(
        reader,
        {"type": "message_start", "message": {"usage": used}},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "name": "add", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"x": 1}'}},
        {"type": "content_block_stop", "index": 1},
    )
    assert parts == [ReasoningPart("hm"), ReasoningPart("", "s"), ToolCallPart("t", "add"), ArgumentsPart('{"x": 1}')]
    for event in (
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ):
        reader.feed(json.dumps(event).encode())
    heard = reader.take_chunk()
    assert heard is not None and (heard.finish, heard.usage) == ("stop", Usage(prompt_tokens=7, completion_tokens=9))


def test_a_refusal_breaks_a_message_off():
    with pytest.raises(UpstreamError, match="refusal"):
        AnthropicReader().feed(json.dumps({"type": "message_delta", "delta": {"stop_reason": "refusal"}}).encode())


@pytest.mark.parametrize("name", ["openai", "anthropic", "litellm"])
def test_config_survives_a_round_trip(name):
    engine = {"name": name, "url": "http://a:1", "api_key_env": "K", "price_in": 0.5, "extra": {"effort": "low"}}
    config = make_config({"dataset": {"train": "t"}, "engine": engine}, "here")
    assert config.engine.text_only and type(config.engine) is SECTIONS.load(name)
    assert make_config(config.model_dump(mode="json"), "again") == config


def test_litellm_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("litellm"))):
        SECTIONS.load("litellm")(name="litellm").preflight("groq/any")


DOUBLE = """
asked = []

class Chunk(dict):
    def model_dump(self):
        return self

class Refused(Exception):
    status_code = 401

async def acompletion(**request):
    asked.append(request)
    if request["model"] == "groq/closed":
        raise Refused("no such key: " + request["api_key"])
    async def stream():
        yield Chunk(choices=[{"delta": {"content": "42"}, "finish_reason": None}])
        yield Chunk(choices=[{"delta": {}, "finish_reason": "stop"}], usage={"prompt_tokens": 3, "completion_tokens": 2})
    return stream()
"""


def test_litellm_is_called_as_its_documents_say(tmp_path, monkeypatch):
    (tmp_path / "litellm.py").write_text(DOUBLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "litellm", raising=False)
    monkeypatch.setenv("K", "key-of-mine")
    section = SECTIONS.load("litellm")(name="litellm", api_key_env="K")

    async def ask(name: str) -> list:
        endpoint = ENGINES.load("litellm")(Path(), name=name, section=section, seed=0)
        return [chunk async for chunk in endpoint.complete(asked())]

    try:
        found = asyncio.run(ask("groq/open"))
        assert found[0].parts == (TextPart("42"),) and found[-1].usage == Usage(prompt_tokens=3, completion_tokens=2)
        [request] = sys.modules["litellm"].asked
        assert (request["model"], request["api_key"], request["stream"]) == ("groq/open", "key-of-mine", True)
        assert "api_base" not in request
        with pytest.raises(RequestError, match="check") as refused:
            asyncio.run(ask("groq/closed"))
        assert "key-of-mine" not in str(refused.value)
    finally:
        sys.modules.pop("litellm", None)
