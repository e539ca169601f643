"""SGLang over HTTP: the contract of every engine, and what is SGLang's own, against a double of its `/generate`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import test_engine
from engine_cases import joined, read, run, write_policy
from sglang_double import SglangDouble, sglang
from test_engine_vllm import NEEDS_SWAP

from penstock.engines import ENGINES, SECTIONS
from penstock.engines.base import Engine
from penstock.errors import EngineError
from penstock.records import Sampling

PROMPT = [1, 2, 3, 4, 5]
NEEDS_BOTH = {"test_logprobs_are_those_of_probabilities"}
"""Of a tempered token SGLang gives one log-probability."""
CONTRACT = [name for name in vars(test_engine) if name.startswith("test_") and name not in NEEDS_SWAP | NEEDS_BOTH]


@asynccontextmanager
async def whole() -> AsyncIterator[Engine]:
    async with SglangDouble() as server, sglang(server) as engine:
        yield engine


@asynccontextmanager
async def incremental() -> AsyncIterator[Engine]:
    async with SglangDouble(incremental=True) as server, sglang(server) as engine:
        yield engine


@pytest.mark.parametrize("opening", [whole, incremental])
@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_of_engines(name: str, opening: test_engine.Opening):
    getattr(test_engine, name)(opening)


def test_events_with_tokens_and_events_with_new_ones_read_alike():
    async def case():
        replies = []
        for opening in (whole, incremental):
            async with opening() as engine:
                replies.append(await read(engine, PROMPT, Sampling(max_tokens=30, seed=2)))
        assert replies[0] == replies[1]
        assert len(replies[0].ids) == 30

    run(case())


def test_the_request_leaves_nothing_to_the_servers_defaults():
    async def case():
        async with SglangDouble() as server, sglang(server) as engine:
            await read(engine, PROMPT, Sampling(max_tokens=7, temperature=0.5, stop_ids=(9,), seed=4))
        [body] = server.requests
        assert body.pop("rid")
        assert body == {
            "input_ids": PROMPT,
            "stream": True,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": 7,
                "temperature": 0.5,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": [9],
                "ignore_eos": False,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "sampling_seed": 4,
            },
        }

    run(case())


@pytest.mark.parametrize(
    ("server", "sampling", "message"),
    [
        ({}, Sampling(top_p=0.9, temperature=0.5), "truncated"),
        ({}, Sampling(temperature=1e-7), "at least 1e-05"),
        ({"deterministic": False}, Sampling(seed=3), "--enable-deterministic-inference"),
    ],
)
def test_what_server_could_not_tell_or_would_ignore_is_rejected(server: dict[str, bool], sampling: Sampling, message: str):
    async def case():
        async with SglangDouble(**server) as double, sglang(double) as engine:
            with pytest.raises(EngineError, match=message):
                await read(engine, PROMPT, sampling)
            assert double.requests == []
            assert len((await read(engine, PROMPT, Sampling(max_tokens=3))).ids) == 3

    run(case())


def test_tempered_and_greedy_tokens_have_log_probability_that_is_known():
    async def case():
        async with whole() as engine:
            tempered = await read(engine, PROMPT, Sampling(max_tokens=5, temperature=0.5))
            greedy = await read(engine, PROMPT, Sampling(max_tokens=5, temperature=0.0))
        assert (len(tempered.logprobs), tempered.full_logprobs) == (5, ())
        assert (greedy.logprobs, len(greedy.full_logprobs)) == ((0.0,) * 5, 5)

    run(case())


@pytest.mark.parametrize(
    ("server", "sampling"),
    [
        ({}, Sampling(max_tokens=5, top_p=0.9)),
        ({}, Sampling(max_tokens=5, top_k=4)),
        ({"original": True}, Sampling(max_tokens=5, temperature=0.5)),
    ],
)
def test_plain_logprob_is_kept_if_the_sampled_one_is_missing(server: dict[str, bool], sampling: Sampling):
    async def case():
        async with SglangDouble(**server) as double, sglang(double) as engine:
            reply = await read(engine, PROMPT, sampling)
        assert (reply.behaviour_known, len(reply.logprobs), reply.full_logprobs) == (False, 5, reply.logprobs)

    run(case())


def test_a_reply_that_nobody_reads_is_aborted_by_its_key():
    async def case():
        async with SglangDouble() as server, sglang(server) as engine:
            async with aclosing(engine.generate(PROMPT, Sampling(max_tokens=2000))) as reply:
                await anext(reply)
            async with asyncio.timeout(30):
                await server.abort.wait()
            assert server.aborted == [server.requests[0]["rid"]]

    run(case())


def test_reply_from_other_weights_is_rejected(tmp_path: Path):
    async def case():
        start = write_policy(tmp_path / "0")
        async with SglangDouble() as server, sglang(server, folder=start) as engine:
            await engine.load(0, start)
            chunks = []
            with pytest.raises(EngineError, match="other"):
                async for chunk in engine.generate(PROMPT, Sampling(max_tokens=2000)):
                    chunks.append(chunk)
                    server.label = "other"
            assert set(joined(chunks).versions) == {0}

    run(case())


def test_the_tables_know_sglang():
    assert ENGINES.load("sglang").__module__ == SECTIONS.load("sglang").__module__ == "penstock.engines.servers.sglang"
