"""Each part of a request has a bound, which is checked before anything is built from it; the refusal names it."""

import asyncio
import json
import tracemalloc
from contextlib import asynccontextmanager

import pytest
from gateway_cases import TOOL, USER, renderer

from penstock.http.asgi import MAX_JSON_KEYS, MAX_JSON_VALUES
from penstock.testing import ScriptedEngine, workbench

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STEP = {"prompt_ids": [1], "response_ids": [1], "trajectory_uid": "train-0.0.1"}
DEEP = json.loads('{"a":' * 65 + "1" + "}" * 65)
TURN = {"role": "user", "content": [{"type": "text", "text": "x"}]}
BODIES = {
    "messages": ("/v1/chat/completions", {"messages": [USER] * 10_001}, 400, "messages has 10001 entries; send at most 10000"),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TURN["content"] * 10_001}]}, 400, "at most 10000"),
    "calls": ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 2001}]}, 400, "at most 2000"),
    "tools": (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [TOOL] * 2001},
        400,
        "tools has 2001 entries; send at most 2000",
    ),
    "values": ("/v1/chat/completions", {"messages": [USER | {"x": [0] * 200_000}]}, 400, "more than 200000 JSON values"),
    "fields": ("/v1/chat/completions", {"messages": [USER]} | {f"k{n}": 1 for n in range(1000)}, 400, "more than 1000 fields"),
    "choices": ("/v1/chat/completions", {"messages": [USER], "n": 129}, 400, "from 1 to 128"),
    "stops": ("/v1/chat/completions", {"messages": [USER], "stop": ["x"] * 17}, 400, "up to 16 strings"),
    "a stop": ("/v1/chat/completions", {"messages": [USER], "stop": "x" * 1001}, 400, "1 to 1000 characters"),
    "stop ids": ("/v1/chat/completions", {"messages": [USER], "stop_token_ids": [1] * 1001}, 400, "at most 1000"),
    "all values": ("/v1/completions", {"prompt": [1] * (MAX_JSON_VALUES + 2)}, 413, "more than 1000000 values"),
    "all keys": ("/v1/completions", {"prompt": "x", "metadata": {str(n): 1 for n in range(MAX_JSON_KEYS)}}, 413, "200000 keys"),
    "prompt ids": ("/v1/completions", {"prompt": [1] * 5000}, 400, "5000 tokens; the model's context holds 4096"),
    "turns": ("/v1/messages", {"max_tokens": 5, "messages": [TURN] * 10_001}, 400, "messages has 10001 entries"),
    "blocks": (
        "/v1/messages",
        {"max_tokens": 5, "messages": [TURN | {"content": TURN["content"] * 4000}] * 3},
        400,
        "at most 10000",
    ),
    "items": ("/v1/responses", {"input": [USER] * 10_001}, 400, "input has 10001 entries; send at most 10000"),
    "references": ("/v1/responses", {"input": [{"id": "msg_x_0"}] * 257}, 400, "none of this rollout"),
    "a reference": ("/v1/responses", {"input": [{"id": "msg_x_" + "1" * 5000}]}, 400, "none of this rollout"),
    "include": ("/v1/responses", {"input": "x", "include": ["x"] * 101}, 400, "include has 101 entries; send at most 100"),
    "steps": ("/submit_steps", {"steps": [STEP] * 1001}, 422, "more than 1000"),
    "rewarded": ("/compute_reward", {"messages": [USER] * 10_001}, 422, "at most 10000"),
    "row": ("/compute_reward", {"messages": [USER], "dataset_fields": {"x": [0] * 10_000}}, 422, "more than 10000 JSON values"),
    "metadata": ("/fuzz/1/v1/register_trajectory", {"metadata": {"x": [0] * 10_000}}, 422, "more than 10000 JSON values"),
    "deep": ("/fuzz/1/v1/register_trajectory", {"metadata": DEEP}, 422, "nested more than 64 levels"),
    "a small body": ("/init_trajectory", {"x": "x" * (4 << 20)}, 413, "larger than 4194304 bytes"),
    "a uid": ("/submit_steps", {"steps": [STEP | {"trajectory_uid": "x" * 1001}]}, 422, "at most 1000 characters"),
    "source": ("/rollouts/train-0.0.1/grade", {"reward": 1.0, "source": "x" * 201}, 400, "at most 200 characters"),
    "message": ("/rollouts/train-0.0.1/end", {"message": "x" * 100_001}, 400, "at most 100000 characters"),
    "a control body": ("/rollouts", {"task_id": "x" * (1 << 20)}, 413, "larger than 1048576 bytes"),
    "control fields": ("/rollouts", {f"k{n}": [1] for n in range(900)}, 400, "more than 1000 JSON values"),
    "updates": ("/api/curation", {"updates": [{"key": "x:0"}] * 1001}, 422, "at most 1000"),
}
QUERIES = {
    "/api/steps?offset=1001": "at most 1000",
    "/api/events?cursor=" + "9" * 5000: "whole numbers",
    "/api/steps?cursor=train:" + "9" * 19: "whole numbers",
    "/api/stats?channel=" + ",".join(map(str, range(101))): "at most 100",
    "/api/steps?limit=" + "9" * 19: "whole number",
}


@asynccontextmanager
async def gateway(**options):
    engine = ScriptedEngine(lambda _: "Hi.", renderer().tokenizer, context_length=4096)
    async with asyncio.timeout(60), workbench(engine, renderer(), **options) as bench:
        session = await bench.rollout()
        tokens = {"rollouts": bench.gateway.tokens.control, "api": bench.gateway.tokens.admin, "v1": session.token}
        yield lambda path: bench.http(tokens.get(path.split("/")[1], bench.gateway.tokens.control))


@pytest.mark.parametrize("kind", BODIES)
async def test_what_is_more_than_bound_is_rejected_by_its_name(kind):
    path, body, status, words = BODIES[kind]
    async with gateway() as http:
        answer = await http(path).post(path, content=json.dumps(body))
        assert (answer.status_code, words in answer.text) == (status, True), answer.text[:500]


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: path[:30])
async def test_parameters_of_the_read_api_are_bounded(path):
    async with gateway() as http:
        answer = await http(path).get(path)
        assert (answer.status_code, QUERIES[path] in answer.text) == (422, True), answer.text[:500]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 1_000_000}]}),
        ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f" * 2_000_000}}]}),
        ("/v1/completions", {"prompt": "x " * 1_000_000}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "x " * 1_000_000}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x " * 1_000_000}]}),
        ("/v1/responses", {"input": "x " * 1_000_000}),
    ],
)
async def test_overlong_text_is_not_tokenized_whole(path, body, monkeypatch):
    longest = 0
    encode = renderer().tokenizer.encode

    def encode_and_note(text):
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text)

    monkeypatch.setattr(renderer().tokenizer, "encode", encode_and_note)  # what is encoded shows nowhere else

    async with gateway() as http:
        answer = await http(path).post(path, content=json.dumps(body))
        assert (answer.status_code, "context" in answer.text or "too long" in answer.text) == (400, True), answer.text[:500]
    assert longest < 100_000


async def test_text_that_fits_is_served_however_few_tokens_it_has():
    async with gateway() as http:
        body = {"messages": [{"role": "user", "content": "arguments" * 3000}]}
        answer = await http("/v1").post("/v1/chat/completions", content=json.dumps(body))
        tokens = answer.json()["usage"]["prompt_tokens"]
        assert (answer.status_code, len(body["messages"][0]["content"]) > 4 * tokens) == (200, True)


async def test_requests_that_are_refused_leave_nothing_in_memory():
    body = b'{"messages": [{"role": "user", "content": "%b"}], "n": 1000}' % (b"x" * 1_000_000)
    async with gateway() as http:
        client = http("/v1")
        assert (await client.post("/v1/chat/completions", content=body)).status_code == 400
        tracemalloc.start()
        try:
            for _ in range(20):
                assert (await client.post("/v1/chat/completions", content=body)).status_code == 400
            assert tracemalloc.get_traced_memory()[0] < 5_000_000
        finally:
            tracemalloc.stop()
