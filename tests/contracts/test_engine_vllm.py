"""vLLM over HTTP: the contract of every engine, and what is vLLM's own."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import test_engine
from engine_cases import joined, read, run

from faults.upstream_cases import MODEL, Act, FakeVllm, edited, engine_over, opened
from penstock.engines import ENGINES
from penstock.engines.base import Engine
from penstock.engines.retry import RetryPolicy
from penstock.engines.servers.vllm import VllmSection
from penstock.errors import ConfigError, EngineError
from penstock.records import Sampling

PROMPT = [1, 2, 3, 4, 5]
ONCE = RetryPolicy(retries=0)
NEEDS_SWAP = {
    "test_tokens_carry_the_version_they_were_sampled_under",
    "test_swap_runs_the_change_once",
    "test_change_that_fails_leaves_version_and_reports_caller",
}
CONTRACT = [name for name in vars(test_engine) if name.startswith("test_") and name not in NEEDS_SWAP]


@asynccontextmanager
async def fake() -> AsyncIterator[Engine]:
    async with FakeVllm() as server, opened([server.url]) as engine:
        yield engine


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_of_engines(name: str):
    getattr(test_engine, name)(fake)


def test_the_request_leaves_nothing_to_the_servers_defaults():
    async def case():
        async with FakeVllm() as server, engine_over(server) as engine:
            sampling = Sampling(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop_ids=(9,), stop=("x",), seed=4)
            await read(engine, PROMPT, sampling)
        assert server.requests == [
            {
                "model": MODEL,
                "prompt": PROMPT,
                "stream": True,
                "logprobs": 0,
                "return_token_ids": True,
                "max_tokens": 7,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 3,
                "min_p": 0.1,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": [9],
                "seed": 4,
            }
        ]

    run(case())


def test_a_request_without_a_seed_sends_none():
    async def case():
        async with FakeVllm() as server, engine_over(server) as engine:
            await read(engine, PROMPT, Sampling(max_tokens=1))
        assert "seed" not in server.requests[0]

    run(case())


@pytest.mark.parametrize("processed", [True, False])
def test_the_opening_finds_out_what_the_log_probabilities_are_under(processed: bool):
    async def case():
        async with FakeVllm(processed=processed) as server, opened([server.url]) as engine:
            plain = await read(engine, PROMPT, Sampling(max_tokens=9, seed=1))
            greedy = await read(engine, PROMPT, Sampling(max_tokens=9, seed=1, temperature=0.0))
            reply = await read(engine, PROMPT, Sampling(max_tokens=9, seed=1, temperature=0.5))
            assert reply.behaviour_known is processed and plain.behaviour_known and greedy.behaviour_known
            assert (len(reply.logprobs), reply.full_logprobs) == (9, () if processed else reply.logprobs)
        assert plain.logprobs == plain.full_logprobs
        assert (greedy.logprobs, greedy.full_logprobs) == ((0.0,) * 9, plain.full_logprobs)

    run(case())


def test_weights_cannot_be_swapped_in_place_and_the_version_stays():
    async def case():
        async with fake() as engine:
            with pytest.raises(EngineError, match="load"):
                await engine.swap(3, lambda: None)
            assert engine.version == 0
            assert set((await read(engine, PROMPT, Sampling(max_tokens=5))).versions) == {0}

    run(case())


def test_the_context_is_the_servers():
    async def case():
        async with FakeVllm(context=100) as server, opened([server.url]) as engine:
            assert engine.context_length == 100
            assert len((await read(engine, [1] * 90, Sampling(max_tokens=10))).ids) == 10
            with pytest.raises(EngineError, match="max_tokens"):
                await read(engine, [1] * 91, Sampling(max_tokens=10))

    run(case())


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "no tokens"),
        ([1], Sampling(max_tokens=0), "at least one token"),
        ([1], Sampling(temperature=0.001), "at least 0.01"),
    ],
)
def test_what_the_server_would_quietly_change_is_refused(prompt: list[int], sampling: Sampling, message: str):
    async def case():
        async with FakeVllm() as server, engine_over(server) as engine:
            with pytest.raises(EngineError, match=message):
                await read(engine, prompt, sampling)
            assert server.requests == []

    run(case())


def test_a_server_that_saw_another_prompt_is_not_believed():
    async def case():
        async with FakeVllm([Act(edit=edited(0, prompt_token_ids=[1, 2, 3]))]) as server, engine_over(server) as engine:
            with pytest.raises(EngineError, match="prompt"):
                await read(engine, PROMPT, Sampling(max_tokens=3))

    run(case())


def test_connections_are_used_again():
    async def case():
        async with FakeVllm() as server, engine_over(server) as engine:
            for _ in range(5):
                async with aclosing(engine.generate(PROMPT, Sampling(max_tokens=3))) as reply:
                    async for chunk in reply:
                        if chunk.finish:
                            break
            assert len(server.connections) == 1

    run(case())


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    async def case():
        monkeypatch.setenv("VLLM_KEY", "very-secret")
        async with FakeVllm(key="very-secret") as server, opened([server.url], api_key_env="VLLM_KEY") as engine:
            assert len((await read(engine, PROMPT, Sampling(max_tokens=3))).ids) == 3

    run(case())


def test_the_key_stays_out_of_messages():
    async def case():
        async with FakeVllm(key="another") as server, engine_over(server, key="very-secret", policy=ONCE) as engine:
            with pytest.raises(EngineError, match="401") as refused:
                await read(engine, PROMPT, Sampling(max_tokens=3))
        assert "very-secret" not in str(refused.value)

    run(case())


def test_a_prompt_of_megabytes_is_sent():
    async def case():
        server = FakeVllm(context=1 << 20)
        server.vocabulary = 50_001
        async with server, engine_over(server) as engine:
            assert len((await read(engine, [50_000] * 250_000, Sampling(max_tokens=3))).ids) == 3

    run(case())


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_KEY", raising=False)
    with pytest.raises(ConfigError, match="VLLM_KEY"):
        open_now("http://127.0.0.1:1", api_key_env="VLLM_KEY")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://me:secret@host", "http://host?key=secret"])
def test_address_that_is_none_is_rejected_without_repeating_its_secrets(url: str):
    with pytest.raises(ConfigError, match=r"engine\.url") as refused:
        open_now(url)
    assert "secret" not in str(refused.value)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1/health"):
        open_now("http://127.0.0.1:1")


def test_an_address_may_end_in_v1():
    async def case():
        async with FakeVllm() as server, opened([f"{server.url}/v1/"]) as engine:
            assert engine.client.fleet.servers[0].url == server.url

    run(case())


def test_servers_that_differ_are_refused():
    async def case():
        async with FakeVllm() as one, FakeVllm(context=64) as other:
            with pytest.raises(ConfigError, match="servers"):
                async with opened([one.url, other.url]):
                    pass

    run(case())


def test_server_down_at_opening_serves_later():
    async def case():
        async with FakeVllm() as one, FakeVllm() as other:
            await other.kill()
            async with opened([one.url, other.url]) as engine:
                late = engine.client.fleet.servers[1]
                assert not late.up.is_set()
                await read(engine, PROMPT, Sampling(max_tokens=3))
                await other.start()
                await late.up.wait()
                replies = [await read(engine, PROMPT, Sampling(max_tokens=3)) for _ in range(2)]
            assert [len(reply.ids) for reply in replies] == [3, 3]
            assert other.requests

    run(case())


def test_slow_reader_gets_joined_chunks_without_loss():
    async def case():
        async with FakeVllm() as server, engine_over(server) as engine:
            chunks = []
            async for chunk in engine.generate(PROMPT, Sampling(max_tokens=50, seed=2)):
                chunks.append(chunk)
                await server.until_running(0)
            again = await read(engine, PROMPT, Sampling(max_tokens=50, seed=2))
        assert len(chunks) < 50
        assert joined(chunks).ids == again.ids

    run(case())


def test_the_table_knows_vllm():
    assert ENGINES.load("vllm").__module__ == "penstock.engines.servers.vllm"


def open_now(url: str, **fields: str) -> None:
    ENGINES.load("vllm")(Path(), name=MODEL, section=VllmSection(name="vllm", url=(url,), **fields), seed=0)
