"""Adapters on servers: each version under its own name, loaded before it is used, unloaded when nobody uses it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import random_adapter
from engine_cases import SHAPE, joined, read, run, write_policy
from sglang_double import SglangDouble, sglang

from faults.upstream_cases import Act, FakeVllm, engine_over
from penstock.engines.base import SampledChunk
from penstock.engines.retry import RetryPolicy
from penstock.engines.servers.base import RemoteEngine
from penstock.errors import EngineError
from penstock.records import Sampling

PROMPT = [1, 2, 3]
PATIENT = RetryPolicy(first_wait_s=0.01, recheck_s=0.01, probe_s=0.02, retries=50)
Double = FakeVllm | SglangDouble


def adapter(folder: Path, version: int) -> Path:
    made = folder / f"{version:06d}"
    made.mkdir(parents=True)
    random_adapter(SHAPE, seed=version).save(made)
    return made


@asynccontextmanager
async def served(kind: str, **options: Any) -> AsyncIterator[tuple[Double, RemoteEngine]]:
    if kind == "sglang":
        async with SglangDouble() as server, sglang(server) as engine:
            server.confesses = True
            yield server, engine
        return
    server = FakeVllm(trainable=False, **options)
    server.takes_adapters = server.confesses = True
    async with server, engine_over(server, policy=PATIENT) as engine:
        yield server, engine


KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


def versions(reply: SampledChunk) -> set[int]:
    """Those that the tokens carry; each token says with its log-probability which adapter sampled it."""
    assert [-logprob - 1 for logprob in reply.logprobs] == list(reply.versions)
    return set(reply.versions)


@KINDS
def test_each_version_has_a_name_and_nothing_is_paused(kind: str, tmp_path: Path):
    async def case():
        async with served(kind) as (server, engine):
            for version in (0, 1, 2):
                await engine.load(version, adapter(tmp_path, version))
                assert engine.version == engine.version_of("") == version
                assert versions(await read(engine, PROMPT, Sampling(max_tokens=4))) == {version}
            names = [call.split("-")[1] for call in server.calls if call.startswith("load")]
            assert names == ["v0", "v1", "v2"]
            assert all(call.startswith(("load policy-v", "unload policy-v")) for call in server.calls)
            assert len(server.adapters) == 1  # those before are not used any more

    run(case())


@KINDS
def test_a_reply_ends_under_the_version_that_it_began_with(kind: str, tmp_path: Path):
    async def case():
        async with served(kind) as (server, engine):
            await engine.load(0, adapter(tmp_path, 0))
            begun, replies = asyncio.Event(), list[SampledChunk]()

            async def long() -> None:
                chunks = list[SampledChunk]()
                async for chunk in engine.generate(PROMPT, Sampling(max_tokens=2000)):
                    chunks.append(chunk)
                    begun.set()
                replies.append(joined(chunks))

            async with asyncio.TaskGroup() as group:
                group.create_task(long())
                await begun.wait()
                await engine.load(1, adapter(tmp_path, 1))
                assert len(server.adapters) == 2 and not replies
                assert engine.folders_in_use() == {tmp_path / "000000", tmp_path / "000001"}
                assert versions(await read(engine, PROMPT, Sampling(max_tokens=4))) == {1}
            assert versions(replies[0]) == {0} and len(replies[0].ids) == 2000
            assert server.running == 0 and len(server.requests) == 3 - 1
            await engine.load(2, adapter(tmp_path, 2))
            assert [Path(root).name for root in server.adapters.values()] == ["000002"]
            assert {folder.name for folder in engine.folders_in_use()} == {"000000", "000001", "000002"}  # one more publication
            await engine.load(3, adapter(tmp_path, 3))
            assert {folder.name for folder in engine.folders_in_use()} == {"000002", "000003"}

    run(case())


@KINDS
def test_two_policies_share_a_server(kind: str, tmp_path: Path):
    async def case():
        async with served(kind) as (server, engine):
            for policy, version in (("planner", 1), ("executor", 2), ("planner", 3)):
                await engine.load(version, adapter(tmp_path / policy, version), policy=policy)
            replies = {
                policy: joined([chunk async for chunk in engine.generate(PROMPT, Sampling(max_tokens=3), policy=policy)])
                for policy in ("planner", "executor", "")
            }
            assert {policy: versions(reply) for policy, reply in replies.items()} == {"planner": {3}, "executor": {2}, "": {0}}
            assert sorted(name.rpartition("-")[0] for name in server.adapters) == ["executor-v2", "planner-v3"]

    run(case())


def test_a_restarted_server_gets_its_adapters_back_before_it_serves(tmp_path: Path):
    async def case():
        async with served("vllm") as (server, engine):
            assert isinstance(server, FakeVllm)
            await engine.load(0, adapter(tmp_path, 0))
            await engine.load(1, adapter(tmp_path, 1))
            await server.kill()
            server.forget()
            await server.start()
            assert versions(await read(engine, PROMPT, Sampling(max_tokens=4))) == {1}
            server.adapters.clear()  # restarted faster than any probe
            assert versions(await read(engine, PROMPT, Sampling(max_tokens=4))) == {1}

    run(case())


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0"])
def test_adapters_are_not_added_to_weights_that_earlier_run_left(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    first = adapter(tmp_path, 0)

    async def case():
        server = FakeVllm(version=version)
        server.takes_adapters = True
        async with server:
            async with engine_over(server, folder=write_policy(tmp_path / "1")) as engine:
                await engine.load(1, tmp_path / "1")
            async with engine_over(server, folder=tmp_path / "1") as engine:
                with pytest.raises(EngineError, match="training"):
                    await engine.load(0, first)
                assert not server.adapters
                server.forget()
                await engine.load(0, first)

    run(case())


def test_what_an_earlier_process_of_the_run_left_is_unloaded(tmp_path: Path):
    async def case():
        async with served("vllm") as (server, engine):
            server.adapters = {
                "policy-v7-dead": str(tmp_path / "000007"),
                "policy-v7-other": "/another/run/served/000007",
                "mine": "/srv/mine",
            }
            await engine.load(0, adapter(tmp_path, 0))
            assert "policy-v7-dead" not in server.adapters
            assert {"policy-v7-other", "mine"} < server.adapters.keys()

    run(case())


@KINDS
def test_an_adapter_that_no_server_takes_leaves_the_version_before(kind: str, tmp_path: Path):
    async def case():
        async with served(kind) as (server, engine):
            await engine.load(0, adapter(tmp_path, 0))
            server.refuses = True
            with pytest.raises(EngineError, match="--enable-lora"):
                await engine.load(1, adapter(tmp_path, 1))
            assert engine.version == 0
            assert versions(await read(engine, PROMPT, Sampling(max_tokens=4))) == {0}

    run(case())


def test_server_without_routes_is_reported_with_remedy(tmp_path: Path):
    async def case():
        async with FakeVllm(trainable=False) as server, engine_over(server, policy=PATIENT) as engine:
            with pytest.raises(EngineError, match="--enable-lora"):
                await engine.load(0, adapter(tmp_path, 0))

    run(case())


def test_server_with_several_replicas_is_rejected(tmp_path: Path):
    async def case():
        server = FakeVllm()
        server.takes_adapters, server.replicas = True, 2
        async with server, engine_over(server, policy=PATIENT) as engine:
            with pytest.raises(EngineError, match="replicas"):
                await engine.load(0, adapter(tmp_path, 0))
            assert server.calls == []

    run(case())


def test_failed_server_is_used_again_once_it_has_the_adapter(tmp_path: Path):
    async def case():
        one, other = FakeVllm(trainable=False), FakeVllm(trainable=False)
        for server in (one, other):
            server.takes_adapters = server.confesses = True
        async with one, other, engine_over(one, other, policy=PATIENT) as engine:
            await engine.load(0, adapter(tmp_path, 0))
            other.refuses = True
            await engine.load(1, adapter(tmp_path, 1))
            for n in range(6):
                assert versions(await read(engine, [*PROMPT, n], Sampling(max_tokens=2))) == {1}
            assert not other.requests
            other.refuses = False
            while not any(root.endswith("000001") for root in other.adapters.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(case())


def test_a_broken_adapter_never_reaches_a_server(tmp_path: Path):
    async def case():
        async with served("vllm") as (server, engine):
            folder = adapter(tmp_path, 0)
            file = folder / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[:100])
            with pytest.raises(EngineError, match="restore"):
                await engine.load(0, folder)
            assert server.calls == []

    run(case())


def test_other_refusals_are_not_tried_again(tmp_path: Path):
    async def case():
        async with served("vllm") as (server, engine):
            assert isinstance(server, FakeVllm)
            await engine.load(0, adapter(tmp_path, 0))
            acts: Sequence[Act] = [Act(status=400, words="no such thing")]
            server.acts.extend(acts)
            with pytest.raises(EngineError, match="thing"):
                await read(engine, PROMPT, Sampling(max_tokens=4))

    run(case())
