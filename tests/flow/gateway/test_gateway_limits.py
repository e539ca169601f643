import asyncio
from contextlib import asynccontextmanager

import pytest
from gateway_cases import TOOL, USER, chat, renderer

from penstock.gateway import GatewayLimits
from penstock.gateway.dialects.chat import ChatDialect
from penstock.gateway.request import ModelCall
from penstock.gateway.response import PendingResponse
from penstock.pool import POOLS
from penstock.records import Sampling, Task, make_rollout
from penstock.testing import ScriptedEngine, ScriptedReply, workbench

PINGS = {
    "/v1/chat/completions": b": still sampling\n\n",
    "/v1/completions": b": still sampling\n\n",
    "/v1/responses": b": still sampling\n\n",
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n',
}


@asynccontextmanager
async def gateway(script, **options):
    engine = ScriptedEngine(script, renderer().tokenizer)
    async with asyncio.timeout(60), workbench(engine, renderer(), **options) as bench:
        yield bench, await bench.rollout(), engine


def asked(path):
    if path.endswith("responses"):
        return {"input": "?", "stream": True}
    return {"prompt": "?", "stream": True} if path == "/v1/completions" else {"messages": [USER], "max_tokens": 64, "stream": True}


@pytest.mark.parametrize("path", PINGS)
@pytest.mark.parametrize("silent_after", [0, 3])
async def test_a_stream_whose_engine_is_silent_is_kept_alive(path, silent_after):
    async with gateway(
        [ScriptedReply("42 it is.", stall_after=silent_after)], serves=True, limits=GatewayLimits(keep_alive_s=0.02)
    ) as (bench, session, engine):
        url, headers = f"{session.base_url.removesuffix('/v1')}{path}", {"authorization": f"Bearer {session.token}"}
        got = b""
        async with bench.http().stream("POST", url, json=asked(path), headers=headers) as response:
            assert response.status_code == 200
            async for part in response.aiter_raw():
                got += part
                if got.count(PINGS[path]) >= 2:
                    engine.release()
        assert b"42" in got.replace(b'"', b"")
        (step,) = (await bench.attempt(session)).steps
        assert (step.finish, step.message["content"]) == ("stop", "42 it is.")


def test_slow_reader_has_one_waiting_event():
    async def main():
        sent, taken = [], asyncio.Event()

        async def send(message):
            sent.append(message)
            await taken.wait()

        dialect = ChatDialect(renderer().tokenizer)
        response, call = PendingResponse(dialect, send), ModelCall(model="m", messages=(), sampling=Sampling(), stream=True)
        response.begin(call, dialect, model="m", keep_alive_s=0.001)
        await asyncio.wait([asyncio.create_task(taken.wait())], timeout=0.05)
        waiting = len(sent)
        taken.set()
        response.end()
        return waiting

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize(
    ("limits", "code", "status"),
    [
        (GatewayLimits(steps=2), "too_many_steps", 400),
        (GatewayLimits(tokens=4), "too_many_tokens", 400),
        (GatewayLimits(calls_per_s=2, concurrent_calls=1), "rate_limit_exceeded", 429),
    ],
)
async def test_rollout_that_asks_for_more_than_share_is_reported_which(limits, code, status):
    async with gateway(["42."] * 6, limits=limits) as (bench, session, _):
        answers = [await chat(bench.http(session.token), USER) for _ in range(6)]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 1 <= len(refused) < 6
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(status, code)}
        assert len((await bench.attempt(session)).steps) == 6 - len(refused)


SECRETS = [
    "sk-proj-abcdefghijklmnopqrstuvwx",
    "AKIAABCDEFGHIJKLMNOP",
    "hf_abcdefghijklmnopqrstuvwxyzabcdefgh",
    "pst_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO-_",  # a controller's token for a device
    "a-secret-known-by-value",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_of_agents_are_stored_nowhere(tmp_path, secret):
    async def main():
        pool, engine = POOLS.load("sqlite")(tmp_path), ScriptedEngine([f"It is {secret}.", "Yes."], renderer().tokenizer)
        rollout = make_rollout("train-0", "t", 0)
        await pool.open_group(Task(id="t", prompt=(USER,)), [rollout], seq=0)
        async with workbench(engine, renderer(), pool=pool, secrets=[SECRETS[-1]]) as bench:
            session = bench.gateway.open(rollout, Sampling(max_tokens=256))
            control, flow = bench.gateway.tokens.control, bench.gateway.tokens.flow(rollout.id)
            ask = {"role": "user", "content": f"My key is {secret}, the gateway's is {control}, a flow's {flow}."}
            answer = (await chat(bench.http(session.token), ask, tools=[TOOL])).json()["choices"][0]["message"]
            assert secret in answer["content"]
            await chat(bench.http(session.token), ask, answer, USER, tools=[TOOL])
            attempt = await bench.attempt(session)
        await pool.close()
        assert [node.parent for node in attempt.nodes] == [None, 0]
        assert attempt.steps[0].message["content"] == "It is [redacted]."
        kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        assert secret.encode() not in kept
        assert control.encode() not in kept
        assert session.token.encode() not in kept
        assert flow.encode() not in kept

    asyncio.run(main())
