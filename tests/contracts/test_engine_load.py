"""Every engine takes the weights of a model folder while requests run; of each token the version is known that sampled it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import SHAPE, embedded, joined, read, run, scripted, write_policy
from sglang_double import SglangDouble, sglang

from faults.upstream_cases import QUICK, Act, FakeVllm, engine_over
from penstock.engines.base import Engine, SampledChunk
from penstock.engines.retry import RetryPolicy
from penstock.engines.servers.base import RemoteEngine
from penstock.errors import EngineError
from penstock.records import Sampling

pytestmark = pytest.mark.slow

PROMPT = [1, 2, 3, 4, 5]
LONG, SHORT = Sampling(max_tokens=2000), Sampling(max_tokens=8)
OUTLASTING = Sampling(max_tokens=500)
"""Not over before a load is refused, which takes an engine less time than taking the weights."""

Double = FakeVllm | SglangDouble
Opening = Callable[[], AbstractAsyncContextManager[Engine]]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "0")


@pytest.fixture(params=["embedded", "scripted", "vllm", "sglang"])
def opening(request: pytest.FixtureRequest, tmp_path: Path, start: Path) -> Opening:
    @asynccontextmanager
    async def remote() -> AsyncIterator[Engine]:
        async with DOUBLES[request.param]() as server, over(server, folder=start) as engine:
            yield engine

    return {"embedded": embedded, "scripted": lambda: scripted(tmp_path)}.get(request.param, remote)


@pytest.fixture(params=["vllm", "sglang"])
def double(request: pytest.FixtureRequest) -> type[Double]:
    return DOUBLES[request.param]


DOUBLES: dict[str, type[Double]] = {"vllm": FakeVllm, "sglang": SglangDouble}


def over(*servers: Double, folder: Path) -> AbstractAsyncContextManager[RemoteEngine]:
    """An engine over doubles of one kind."""
    if isinstance(servers[0], FakeVllm):
        return engine_over(*servers, folder=folder)
    return sglang(*servers, folder=folder)


def test_running_reply_continues_and_tokens_carry_their_version(opening: Opening, tmp_path: Path):
    async def case():
        async with opening() as engine, aclosing(engine.generate(PROMPT, LONG)) as reply:
            chunks = [await anext(reply)]
            await engine.load(7, write_policy(tmp_path / "7", seed=7))
            assert engine.version == 7
            chunks += [chunk async for chunk in reply]
        whole = joined(chunks)
        assert (set(whole.versions), list(whole.versions)) == ({0, 7}, sorted(whole.versions))
        assert (len(whole.ids), whole.finish) == (2000, "length")

    run(case())


def test_what_comes_after_a_load_is_sampled_under_it(opening: Opening, tmp_path: Path):
    async def case():
        async with opening() as engine:
            for version in (3, 4, 9):
                await engine.load(version, write_policy(tmp_path / str(version), seed=version))
                assert set((await read(engine, PROMPT, SHORT)).versions) == {version}

    run(case())


@pytest.mark.parametrize("opening", ["embedded", "vllm", "sglang"], indirect=True)
@pytest.mark.parametrize("fault", ["another shape", "cut short", "no weights", "no config"])
def test_wrong_model_folder_is_rejected_and_the_old_version_served(opening: Opening, tmp_path: Path, fault: str):
    folder = write_policy(tmp_path / "1", shape=replace(SHAPE, layers=3) if fault == "another shape" else SHAPE)
    weights = folder / "model.safetensors"
    if fault == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    if fault.startswith("no "):
        (weights if fault == "no weights" else folder / "config.json").unlink()

    async def case():
        async with opening() as engine, aclosing(engine.generate(PROMPT, OUTLASTING)) as reply:
            first = await anext(reply)
            with pytest.raises(EngineError, match=r"[/]1"):
                await engine.load(1, folder)
            assert engine.version == 0
            rest = [chunk async for chunk in reply]
            assert set(joined([first, *rest]).versions) == {0}
            assert set((await read(engine, PROMPT, SHORT)).versions) == {0}

    run(case())


def test_an_embedded_engine_samples_as_the_loaded_weights_say(tmp_path: Path):
    async def case():
        async with embedded() as engine:
            before = await read(engine, PROMPT, Sampling(max_tokens=20, seed=1))
            await engine.load(1, write_policy(tmp_path / "1", seed=5))
            changed = await read(engine, PROMPT, Sampling(max_tokens=20, seed=1))
            await engine.load(2, write_policy(tmp_path / "2", seed=0))
            again = await read(engine, PROMPT, Sampling(max_tokens=20, seed=1))
        assert changed.logprobs != before.logprobs
        assert (again.ids, again.logprobs) == (before.ids, before.logprobs)

    run(case())


def test_under_load_every_stamp_is_what_the_server_held(double: type[Double], start: Path, tmp_path: Path):
    async def case():
        progress = asyncio.Event()

        async def follow(engine: Engine, n: int) -> SampledChunk:
            chunks: list[SampledChunk] = []
            async for chunk in engine.generate([1 + n, 2], Sampling(max_tokens=200, seed=n)):
                chunks.append(chunk)
                progress.set()
            return joined(chunks)

        async with double() as one, double() as other, over(one, other, folder=start) as engine:
            one.confesses = other.confesses = True
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(follow(engine, n)) for n in range(12)]
                for version in range(1, 6):
                    progress.clear()
                    await progress.wait()
                    await engine.load(version, write_policy(tmp_path / str(version)))
            replies = [task.result() for task in tasks]
        assert all((len(reply.ids), reply.finish) == (200, "length") for reply in replies)
        assert [held(reply) for reply in replies] == [reply.versions for reply in replies]
        assert {0, 1, 2} <= {version for reply in replies for version in reply.versions}

    run(case())


def test_server_is_paused_for_weights_and_clears_its_caches(start: Path):
    async def case():
        async with FakeVllm() as server, over(server, folder=start) as engine:
            await engine.load(0, start)
        assert server.calls == ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]
        async with SglangDouble() as server, over(server, folder=start) as engine:
            await engine.load(0, start)
        assert server.calls == ["pause_generation", "update_weights_from_disk", "continue_generation"]

    run(case())


def test_server_that_fails_to_load_weights_is_left_out(double: type[Double], start: Path, tmp_path: Path):
    async def case():
        async with double() as one, double() as other, over(one, other, folder=start) as engine:
            one.refuses = one.confesses = other.confesses = True
            await engine.load(1, write_policy(tmp_path / "1"))
            late = engine.client.fleet.servers[0]
            assert (late.up.is_set(), engine.version) == (False, 1)
            assert all([held(await read(engine, PROMPT, SHORT)) == (1,) * 8 for _ in range(4)])
            assert not one.requests
            one.refuses = False
            await late.up.wait()
            assert (late.version, one.held) == (1, 1)

    run(case())


def test_where_no_server_takes_weights_all_continue_with_those_before(double: type[Double], start: Path, tmp_path: Path):
    async def case():
        async with double() as server, over(server, folder=start) as engine:
            server.confesses = True
            await engine.load(1, write_policy(tmp_path / "1"))
            async with aclosing(engine.generate(PROMPT, OUTLASTING)) as reply:
                chunks = [await anext(reply)]
                server.refuses = True
                with pytest.raises(EngineError, match="path"):
                    await engine.load(2, write_policy(tmp_path / "2"))
                server.refuses = False
                await engine.client.fleet.servers[0].up.wait()
                chunks += [chunk async for chunk in reply]
        whole = joined(chunks)
        assert (engine.version, set(whole.versions), set(held(whole))) == (1, {1}, {1})
        assert len(whole.ids) == 500

    run(case())


def test_server_that_restarts_gets_current_weights_before_it_serves(double: type[Double], start: Path, tmp_path: Path):
    async def case():
        async with double() as server, over(server, folder=start) as engine:
            await engine.load(1, write_policy(tmp_path / "1"))
            await server.kill()
            with pytest.raises(EngineError, match="server"):
                await read(engine, PROMPT, SHORT)
            server.forget()
            server.confesses = True
            await server.start()
            await engine.client.fleet.servers[0].up.wait()
            reply = await read(engine, PROMPT, SHORT)
        assert (reply.versions, held(reply)) == ((1,) * 8, (1,) * 8)

    run(case())


def test_weights_changed_by_others_are_detected_and_restored(start: Path, tmp_path: Path):
    async def case():
        policy = RetryPolicy(recheck_s=0.0, probe_s=0.0)
        async with FakeVllm([Act(stall_after=3)]) as server, engine_over(server, folder=start, policy=policy) as engine:
            server.confesses = True
            await engine.load(1, write_policy(tmp_path / "1"))
            running = asyncio.ensure_future(read(engine, PROMPT, SHORT))
            await server.stalled.wait()
            server.label, server.held = "another run", 5
            reply = await running
        assert held(reply) == reply.versions == (1,) * 8
        assert server.gone.is_set()

    run(case())


def test_server_that_falls_ill_while_nobody_asks_gets_no_request(start: Path):
    async def case():
        policy = replace(QUICK, probe_s=0.0, retries=0)
        async with FakeVllm() as one, FakeVllm() as other, engine_over(one, other, folder=start, policy=policy) as engine:
            await read(engine, PROMPT, SHORT)
            one.healthy = False
            for _ in range(2):  # the second time, what was said the first time has been heard
                one.asked.clear()
                await one.asked.wait()
            before = len(one.requests)
            assert [len((await read(engine, PROMPT, SHORT)).ids) for _ in range(3)] == [8, 8, 8]
            assert (len(one.requests), sum(engine.client.counts.values())) == (before, 0)

    run(case())


def test_continued_reply_draws_again(start: Path):
    async def case():
        async with FakeVllm([Act(stall_after=3)]) as server, over(server, folder=start) as engine:
            running = asyncio.ensure_future(read(engine, PROMPT, Sampling(max_tokens=8, seed=4)))
            await server.stalled.wait()
            await engine.load(0, start)
            reply = await running
        first, second = server.requests
        assert second["prompt"] == [*PROMPT, *reply.ids[: len(second["prompt"]) - len(PROMPT)]]
        assert second["max_tokens"] == 8 - (len(second["prompt"]) - len(PROMPT))
        assert first["seed"] == 4 != second["seed"]
        assert len(reply.ids) == 8

    run(case())


@pytest.mark.parametrize(
    ("device", "vocabulary", "tied", "message"),
    [
        ("cuda", 61, False, "has 61 tokens and not 60"),
        ("cuda", 59, False, "has 59 tokens and not 60"),
        ("cpu", 60, True, "tied to the embeddings"),
    ],
)
def test_a_server_that_weights_would_harm_is_given_none(tmp_path: Path, device: str, vocabulary: int, tied: bool, message: str):
    async def case():
        folder = write_policy(tmp_path / "0", shape=replace(SHAPE, tied=tied))
        async with FakeVllm() as server, over(server, folder=folder) as engine:
            server.device, server.root = device, str(tmp_path / "served")
            (tmp_path / "served").mkdir()
            (tmp_path / "served" / "config.json").write_text(f'{{"vocab_size": {vocabulary}}}')
            with pytest.raises(EngineError, match=message):
                await engine.load(0, folder)
            assert server.calls == [] and not server.crashed

    run(case())


def test_server_without_routes_is_reported_how_to_start(start: Path):
    async def case():
        async with FakeVllm(trainable=False) as server, over(server, folder=start) as engine:
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
                await engine.load(0, start)
            assert len((await read(engine, PROMPT, SHORT)).ids) == 8

    run(case())


def held(reply: SampledChunk) -> tuple[int, ...]:
    """What a confessing server held when it sampled each token."""
    return tuple(round(-logprob) - 1 for logprob in reply.logprobs)
