"""How servers and endpoints are asked for structured output."""

import json

from penstock.engines.servers import sglang, vllm
from penstock.engines.text_endpoints.anthropic import AnthropicEndpoint, AnthropicSection
from penstock.engines.text_endpoints.base import TextRequest
from penstock.engines.text_endpoints.openai import chat_request
from penstock.records import ReplyFormat, ReplyGrammar, Sampling

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMAR = ReplyGrammar(lark="start: /x/", schema=json.dumps(SCHEMA))
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def test_vllm_gets_the_grammar_that_the_trainer_replays():
    assert vllm.request_body("m", [1], Sampling(grammar=GRAMMAR))["structured_outputs"] == {"grammar": "%llguidance {}\nstart: /x/"}
    assert "structured_outputs" not in vllm.request_body("m", [1], Sampling())


def test_sglang_gets_the_schema():
    params = sglang.request_body([1], Sampling(grammar=GRAMMAR), "k")["sampling_params"]
    assert json.loads(params["json_schema"]) == SCHEMA


def test_an_openai_endpoint_gets_what_was_asked_for():
    asked = TextRequest(
        messages=[{"role": "user", "content": "hi"}],
        sampling=Sampling(),
        tools=[TOOL],
        strict=frozenset({"f"}),
        format=ReplyFormat(schema=SCHEMA, name="n", strict=True, description="d"),
    )
    body = chat_request(asked, limit="max_tokens")
    wanted = {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": wanted}
    assert body["tools"][0]["function"] == {"name": "f", "parameters": SCHEMA, "strict": True}
    plain = TextRequest(messages=asked.messages, sampling=Sampling(), format=ReplyFormat())
    assert chat_request(plain, limit="max_tokens")["response_format"] == {"type": "json_object"}


def test_an_anthropic_endpoint_gets_what_was_asked_for():
    endpoint = AnthropicEndpoint("m", AnthropicSection.model_validate({"name": "anthropic", "url": "http://localhost:1"}))
    messages = [{"role": "user", "content": "hi"}]
    asked = TextRequest(
        messages=messages, sampling=Sampling(), tools=[TOOL], strict=frozenset({"f"}), format=ReplyFormat(schema=SCHEMA)
    )
    body = endpoint.body(asked)
    assert body["output_config"] == {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert body["tools"] == [{"name": "f", "input_schema": SCHEMA, "strict": True}]
