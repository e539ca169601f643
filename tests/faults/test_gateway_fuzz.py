"""Requests that nobody should send: every route answers, with a status below 500, and goes on serving."""

import asyncio
import json
import string
from collections import Counter

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.chat.renderer import Renderer
from penstock.gateway.flows import reward_by_rule
from penstock.records import Sampling, Task, make_rollout
from penstock.testing import ScriptedEngine, workbench, write_tokenizer

CASES = 2_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
]
BLOCKS = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r", "is_error": False}]},
]
ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
    {"role": "user", "content": "u"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "r"},
]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stream": False, "stop": ["x"], "n": 1, "max_tokens": 5}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BODIES = {
    "/v1/chat/completions": {"model": "m", "messages": TALK, "tools": [TOOL], "tool_choice": "auto", **SAMPLING},
    "/v1/completions": {"model": "m", "prompt": "p", "echo": False, **SAMPLING},
    "/v1/messages": {
        "model": "m",
        "messages": BLOCKS,
        "system": [{"type": "text", "text": "s"}],
        "max_tokens": 5,
        "stream": True,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": BLOCKS},
    "/v1/responses": {
        "model": "m",
        "input": ITEMS,
        "tools": [FLAT, {"type": "web_search"}, {"type": "custom", "name": "g"}],
        "instructions": "i",
        "stream": True,
        "max_output_tokens": 5,
        "reasoning": {"summary": "auto"},
        "include": [],
        "text": {"verbosity": "low"},
    },
    "/v1/responses/input_tokens": {"model": "m", "input": ITEMS},
    "/rollouts": {"rollout_id": "train-0.0.1"},
    "/rollouts/train-0.0.1/grade": {"reward": 1.0, "source": "s", "transcript": None},
    "/rollouts/nobody/end": {"end": "completed", "message": "m"},
    "/generate": {"trajectory_uid": "train-0.0.1", "prompt_uid": "p", "messages": TALK, "tools": [TOOL], **SAMPLING},
    "/train-0.0.1/1/v1/generate": {"prompt_ids": [1, 2], "sampling_params": {"temperature": 0.5, "logprobs": True}},
    "/submit_steps?channel=train": {
        "steps": [
            {
                "prompt_ids": [1, 2],
                "response_ids": [3],
                "reward": 1.0,
                "rollout_log_probs": [-0.5],
                "trajectory_uid": "train-0.0.1",
                "prompt_uid": "p",
                "step_index": 0,
                "policy_version": 0,
                "is_last": True,
                "metadata": {"a": 1},
            }
        ]
    },
    "/compute_reward": {"messages": TALK, "dataset_fields": {"ground_truth": "42"}, "trajectory_uid": "train-0.0.1"},
    "/init_trajectory": {},
    "/train-0.0.1/1/v1/register_trajectory": {
        "channel": "train",
        "metadata": {"a": [1], "sampling": {"temperature": 0.5}},
        "sampling": {"top_p": 0.5},
    },
    "/a-new-one/1/register_trajectory": {"channel": "val", "metadata": {"a": 1, "policy_version": 1}},
    "/train-0.0.1/1/v1/complete_trajectory": {"reward": 1.0, "channel": "train"},
    "/complete_trajectory/train-0.0.1": {"reward": None},
    "/api/curation": {"updates": [{"key": "train-0.0.1:0", "trainable": False, "quality": 0.5, "note": "n"}]},
}
READ = [
    "/api/steps",
    "/api/events?cursor=1&limit=2",
    "/api/steps?cursor=x",
    "/api/trajectories?channel=train,val&offset=1",
    "/ready",
]

ODD_TEXTS = ["\ud800", "\x00", "<|im_end|>", "auto", "none", "user", "tool", "function", "text", "f" * 5000]
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
odd = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(ODD_TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_lowercase, max_size=4), inner, max_size=3),
    max_leaves=8,
)


def places(value, path=()):
    """Where in a body something may be put instead."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def put(value, path, instead):
    """`value` with something else at `path`; a missing one takes the key away."""
    if not path:
        return instead
    copy = dict(value) if isinstance(value, dict) else list(value)
    if instead is GONE and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = put(copy[path[0]], path[1:], instead)
    return copy


GONE = object()


def opens(path):
    """Which token a path asks for."""
    if path.startswith(("/api", "/metrics")):
        return "admin"
    if path.endswith("_trajectory") or path.startswith(("/submit", "/compute", "/init", "/complete")):
        return "control" if "a-new-one" in path else "flow"
    return "control" if path.startswith("/rollouts") else "model"


@st.composite
def requests(draw):
    path = draw(
        st.sampled_from(
            [*BODIES, "/v1/models", "/v1/models/x", "/health", "/metrics", "/", "/v1/x", "/a/b/c/v1/chat/completions", *READ]
        )
    )
    body = BODIES.get(path, {})
    for _ in range(draw(st.integers(0, 3))):
        found = list(places(body))
        body = put(body, draw(st.sampled_from(found)), draw(st.just(GONE) | odd))
        if body is GONE or not isinstance(body, dict | list):
            break
    raw = b"" if body is GONE else encode(body)
    cut = draw(st.none() | st.integers(0, len(raw)))
    method = draw(
        st.sampled_from(["POST" if path in BODIES else "GET"] * 12 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    )
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=2))
    return (
        method,
        path,
        raw if cut is None else raw[:cut],
        headers,
        draw(st.sampled_from([opens(path)] * 8 + ["model", "flow", "control", "admin", "none"])),
    )


HEADERS = [
    ("x-stainless-retry-count", "1"),
    ("x-stainless-retry-count", "é"),
    ("idempotency-key", "k"),
    ("idempotency-key", "k" * 300),
    ("x-sample-id", "p"),
    ("x-sample-id", "p" * 300),
    ("x-rollout-id", "other"),
    ("content-type", "text/plain"),
    ("anthropic-beta", "x"),
    ("content-encoding", "gzip"),
]


def encode(body):
    """JSON as a careless client might write it, lone surrogates included."""
    return json.dumps(body).encode()


async def fire(bench, number, request):
    """Send one request for a rollout of its own; its status."""
    method, path, body, headers, holds = request
    rollout = make_rollout(f"train-{number}", "t", 0)
    await bench.pool.open_group(Task(id="t", prompt=({"role": "user", "content": "?"},)), [rollout], seq=number)
    session = bench.gateway.open(rollout, Sampling(max_tokens=64))
    ours = bench.gateway.tokens
    tokens = {"model": session.token, "flow": session.flow_token, "control": ours.control, "admin": ours.admin, "none": ""}
    held = [("authorization", f"Bearer {tokens[holds]}".encode())] if tokens[holds] else []
    sent = [*held, *((name, value.encode()) for name, value in headers)]
    path = path.replace("train-0.0.1", rollout.id)
    answer = await asyncio.wait_for(bench.http().request(method, path, content=body, headers=sent), 10)
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code >= 400 and method != "HEAD":
        refusal = orjson.loads(answer.content)
        assert refusal["detail"] and refusal["code"] if "detail" in refusal else refusal["error"]["message"]
    assert (await bench.http().get("/health")).status_code == 200
    bench.gateway.close(rollout.id)
    return answer.status_code


@pytest.mark.slow
def test_no_request_makes_the_gateway_fail(tmp_path):
    renderer = Renderer.load(write_tokenizer(tmp_path))
    engine = ScriptedEngine(lambda prompt: "It is 42.", renderer.tokenizer, context_length=4096)
    statuses = Counter()

    with asyncio.Runner() as runner:
        opened = workbench(engine, renderer)
        bench = runner.run(opened.__aenter__())
        bench.gateway.reward_function = reward_by_rule

        @settings(
            max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], derandomize=True
        )
        @given(requests())
        def check(request):
            statuses[runner.run(fire(bench, statuses.total(), request))] += 1

        check()
        runner.run(opened.__aexit__(None, None, None))
    print(f"{statuses.total()} requests: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= CASES
    assert {200, 400} <= set(statuses)
