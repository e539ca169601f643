"""Requests with random fields, documented or unknown, in every dialect: served, or refused by a field of the page's list."""

import asyncio
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from gateway_cases import renderer

from penstock.testing import ScriptedEngine, workbench

REQUESTS = 2000 if os.environ.get("PENSTOCK_FAULTS") == "full" else 120
PAGE = (Path(__file__).parents[3] / "docs/connect-your-agent.md").read_text()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "s", "schema": SCHEMA}
FUNCTION = {"name": "f", "description": "F.", "parameters": SCHEMA}
PNG = "iVBORw0KGgo="
LABEL = ("x", "ann")

CHAT_TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "custom", "custom": {"name": "g"}}, {"type": "web_search"}]
CHAT = {
    "frequency_penalty": (0, 0.5, -2),
    "presence_penalty": (0, 1.5),
    "logit_bias": ({}, {"7": 5}, {"7": -100}, {"7": 100, "8": 100}),
    "logprobs": (True, False),
    "top_logprobs": (0, 3),
    "max_tokens": (5,),
    "max_completion_tokens": (7,),
    "metadata": ({"a": "b"},),
    "modalities": (["text"], ["text", "audio"]),
    "audio": ({"voice": "alloy", "format": "wav"},),
    "n": (1, 2),
    "parallel_tool_calls": (True, False),
    "prediction": ({"type": "content", "content": "Hi"},),
    "prompt_cache_key": LABEL,
    "prompt_cache_retention": ("24h",),
    "prompt_cache_options": ({"mode": "implicit"},),
    "reasoning_effort": ("low", "none"),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    ),
    "safety_identifier": LABEL,
    "seed": (3,),
    "service_tier": ("auto", "flex"),
    "stop": ("END", ["a", "b"]),
    "store": (True, False),
    "stream_options": ({"include_usage": True, "include_obfuscation": False},),
    "temperature": (0, 0.7, 2),
    "tool_choice": ("auto", "none"),
    "top_p": (0.5, 1),
    "user": LABEL,
    "verbosity": ("low",),
    "web_search_options": ({"search_context_size": "low"},),
    "functions": ([FUNCTION], [{"name": "f"}]),
    "function_call": ("auto", "none"),
    "moderation": ({"model": "m"},),
}
RESPONSES = {
    "background": (False, True),
    "context_management": ([{"type": "compaction"}],),
    "conversation": ("conv_1",),
    "include": (["reasoning.encrypted_content"], ["message.output_text.logprobs"]),
    "instructions": ("Be brief.",),
    "max_output_tokens": (9,),
    "max_tool_calls": (3,),
    "metadata": ({"a": "b"},),
    "moderation": ({"model": "m"},),
    "parallel_tool_calls": (True, False),
    "prompt": ({"id": "pmpt_1"},),
    "prompt_cache_key": LABEL,
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("24h",),
    "reasoning": ({"effort": "low", "summary": "auto"},),
    "safety_identifier": LABEL,
    "service_tier": ("auto",),
    "store": (True, False),
    "stream_options": ({"include_obfuscation": False},),
    "temperature": (0, 0.7),
    "text": ({"verbosity": "low"}, {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}),
    "tool_choice": ("auto", "none", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
    "top_logprobs": (0, 4),
    "top_p": (0.5,),
    "truncation": ("auto", "disabled"),
    "user": LABEL,
}
MESSAGES = {
    "cache_control": ({"type": "ephemeral"},),
    "container": ("c_1",),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    "compaction": ({"type": "auto"},),
    "diagnostics": ({"a": 1},),
    "fallbacks": ([{"model": "m"}],),
    "inference_geo": ("eu",),
    "mcp_servers": ([{"type": "url", "name": "m", "url": "http://x"}],),
    "metadata": ({"user_id": "u"},),
    "output_config": ({"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "service_tier": ("auto",),
    "speed": ("fast",),
    "stop_sequences": (["END"],),
    "system": ("Be brief.", [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]),
    "temperature": (0, 0.7),
    "thinking": ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}, {"type": "disabled"}),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}),
    "top_k": (5,),
    "top_p": (0.5,),
    "user_profile_id": LABEL,
    "workspace_id": LABEL,
}
COMPLETIONS = {
    "best_of": (1,),
    "echo": (True, False),
    "frequency_penalty": (0, 0.5),
    "logit_bias": ({}, {"7": 5}, {"7": -100}, {"7": 100, "8": 100}),
    "logprobs": (0, 2),
    "max_tokens": (5,),
    "n": (1, 2),
    "presence_penalty": (0, 0.5),
    "seed": (3,),
    "stop": ("END",),
    "stream_options": ({"include_usage": True},),
    "suffix": ("", "end"),
    "temperature": (0, 1),
    "top_p": (0.5,),
    "user": LABEL,
}
MESSAGES_CONTENT = (
    "Hello",
    [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
    [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}],
    [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Hello"}}],
    [{"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "Hello"}]}],
)
CHAT_CONTENT = (
    "Hello",
    [{"type": "text", "text": "Hello"}],
    [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}}],
    [{"type": "file", "file": {"file_id": "f_1"}}],
    [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
)
RESPONSES_CONTENT = (
    "Hello",
    [{"type": "input_text", "text": "Hello"}],
    [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}],
    [{"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,SGVsbG8="}],
)


def chat(dice):
    return {"messages": [{"role": "user", "content": dice.choice(CHAT_CONTENT)}], "tools": CHAT_TOOLS}


def responses(dice):
    tools = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
    return {"input": [{"role": "user", "content": dice.choice(RESPONSES_CONTENT)}], "tools": tools}


def messages(dice):
    tools = [{"name": "f", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": dice.choice(MESSAGES_CONTENT)}], "tools": tools}


DIALECTS = {
    "/v1/chat/completions": ("Chat Completions", chat, CHAT),
    "/v1/responses": ("Responses", responses, RESPONSES),
    "/v1/messages": ("Messages", messages, MESSAGES),
    "/v1/completions": ("Completions", lambda dice: {"prompt": dice.choice(["Hello", [1, 2, 3]])}, COMPLETIONS),
}


def refused_fields(title):
    """The fields that the page says are refused."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {title} |"))
    reasons = PAGE.partition("| field | reason |")[2].partition("\n\n")[0]
    return set(re.findall(r"`(\w+)`", row)) | {"best_of", "echo", "logit_bias"} & set(re.findall(r"`(\w+)`", reasons))


def random_request(dice, path):
    _, base, fields = DIALECTS[path]
    chosen = {name: dice.choice(fields[name]) for name in dice.sample(sorted(fields), dice.randint(0, 6))}
    unknown = {f"field_{dice.randint(0, 99)}": dice.choice([1, "x", None, [], {"a": [True]}]) for _ in range(dice.randint(0, 2))}
    body = {"model": "any", "stream": dice.random() < 0.4, **base(dice), **chosen, **unknown}
    return {name: value for name, value in body.items() if name != "tools" or "functions" not in body}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_documented_field_is_served_or_refused_as_the_page_says(path):
    """A refusal must name a field of the page's list that the request has; what is unknown is counted."""
    dice, title = random.Random(path), DIALECTS[path][0]
    listed, seen = refused_fields(title), Counter()

    async def main():
        engine = ScriptedEngine(lambda _: '{"a": 1}', renderer().tokenizer, chunk=8)
        async with workbench(engine, renderer()) as bench:
            session = await bench.rollout()
            http = bench.http(session.token)
            for _ in range(REQUESTS // len(DIALECTS)):
                body = random_request(dice, path)
                answer = await http.post(path, json=body)
                seen[answer.status_code] += 1
                if answer.status_code != 200:
                    named = re.split(r"[.\[]", str(param_of(answer.json())))[0]
                    assert answer.status_code == 400 and named in listed & body.keys(), (body, answer.text)
            unknown = [name for name in bench.gateway.counts if name.startswith("ignored:field_")]
            assert unknown

    asyncio.run(main())
    assert seen[200] > 0.5 * sum(seen.values()), seen


def param_of(body):
    error = body["error"]
    return error.get("param") or error.get("details", {}).get("param")
