"""`--sessions`: a rollout for each session id that clients send, under one key; rewards come later."""

import json
import re
from contextlib import asynccontextmanager

import pytest
from gateway_cases import USER, renderer

from penstock.gateway.session import session_rollout
from penstock.testing import ScriptedEngine, workbench

UUID = "0193c7a1-7a00-7abc-8def-0123456789ab"


@asynccontextmanager
async def gateway(*, sessions=True):
    engine = ScriptedEngine(lambda _: "Hi.", renderer().tokenizer)
    async with workbench(engine, renderer(), sessions=sessions) as bench:
        yield bench


async def chat(bench, *, headers=None, history=(USER,), **fields):
    http = bench.http(bench.gateway.tokens.session_key)
    body = {"model": "any", "messages": list(history), **fields}
    return await http.post("/v1/chat/completions", json=body, headers=headers or {})


async def test_interleaved_sessions_are_rollouts_each_on_one_path():
    async with gateway() as bench:
        said = [USER, {"role": "assistant", "content": "Hi."}, USER]
        for history in ([USER], said):
            for name in ("a", "b", "c"):
                assert (await chat(bench, headers={"X-Session-ID": name}, history=history)).status_code == 200
        for name in ("a", "b", "c"):
            attempt = await bench.pool.rollout(f"session-{name}")
            assert [node.parent for node in attempt.nodes] == [None, 0] and attempt.ref.channel == "adhoc"


async def test_the_reward_comes_later_and_the_key_cannot_give_it():
    async with gateway() as bench:
        await chat(bench, prompt_cache_key="thread-7")
        path, body = "/rollouts/session-thread-7/grade", {"reward": 1.0}
        assert (await bench.http(bench.gateway.tokens.session_key).post(path, json=body)).status_code == 403
        assert (await bench.http(bench.gateway.tokens.control).post(path, json=body)).status_code == 200
        assert (await bench.http(bench.gateway.tokens.control).post("/rollouts/session-thread-7/end", json={})).status_code == 200
        assert (await bench.pool.rollout("session-thread-7")).reward == 1.0
        assert (await chat(bench, prompt_cache_key="thread-7")).status_code == 409


async def test_call_without_a_session_lists_every_place():
    async with gateway() as bench:
        reported = (await chat(bench)).json()["error"]["message"]
        headers = re.search(r"the headers (.*?), or a field", reported)[1].split(", ")
        fields = re.search(r"a field of the body: (.*?);", reported)[1].split(", ")
        assert {"x-session-id", "x-claude-code-session-id", "session-id", "conversation-id"} <= set(headers)
        for name in headers:
            assert (await chat(bench, headers={name: "a"})).status_code == 200
        assert fields == ["metadata.session_id", "metadata.user_id of Claude Code", "session_id", "prompt_cache_key"]


async def test_tokens_are_counted_for_a_session():
    async with gateway() as bench:
        counted = await bench.http(bench.gateway.tokens.session_key).post(
            "/v1/messages/count_tokens", json={"messages": [USER]}, headers={"x-claude-code-session-id": UUID}
        )
        assert counted.status_code == 200


async def test_without_sessions_the_key_opens_nothing():
    async with gateway(sessions=False) as bench:
        assert (await chat(bench, headers={"X-Session-ID": "a"})).status_code == 401


@pytest.mark.parametrize(
    ("headers", "body", "rollout"),
    [
        ([(b"x-session-id", b"r-1")], {}, "session-r-1"),
        ([(b"x-claude-code-session-id", UUID.encode())], {"metadata": {"user_id": "x"}}, f"session-{UUID}"),
        ([(b"session-id", UUID.encode())], {"prompt_cache_key": "other"}, f"session-{UUID}"),
        ([], {"metadata": {"user_id": f"user_1_account__session_{UUID}"}}, f"session-{UUID}"),
        ([], {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}, f"session-{UUID}"),
        ([], {"metadata": {"session_id": "s"}}, "session-s"),
        ([], {"session_id": "s"}, "session-s"),
        ([], {"prompt_cache_key": UUID}, f"session-{UUID}"),
        ([(b"x-session-id", b"../../etc")], {}, "session-7e7d4f"),
    ],
)
def test_ids_are_found_where_clients_put_them(headers, body, rollout):
    found = session_rollout(headers, json.dumps(body).encode())
    assert found.startswith(rollout[:8]) and "/" not in found
    assert found == rollout or len(found) == 40
