"""Every engine: ids in; ids, log-probabilities and versions out, as they are sampled."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from pathlib import Path

import pytest
from engine_cases import embedded, joined, read, read_all, run, scripted

from penstock.engines.base import Engine
from penstock.errors import EngineError
from penstock.records import Sampling

Opening = Callable[[], AbstractAsyncContextManager[Engine]]
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(params=["embedded", "paged", "scripted"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Opening:
    return {"embedded": embedded, "paged": partial(embedded, paged=True), "scripted": partial(scripted, tmp_path)}[request.param]


def test_chunks_are_aligned_and_only_the_last_has_a_finish(opening: Opening):
    async def case():
        async with opening() as engine:
            chunks = [chunk async for chunk in engine.generate(PROMPT, Sampling(max_tokens=12))]
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert all(len(c.ids) == len(c.logprobs) == len(c.full_logprobs) == len(c.versions) for c in chunks)
        assert len(joined(chunks).ids) == 12

    run(case())


def test_chunks_arrive_while_the_reply_is_being_sampled(opening: Opening):
    async def case():
        async with opening() as engine, aclosing(engine.generate(PROMPT, Sampling(max_tokens=2000))) as reply:
            first = await anext(reply)
            assert 0 < len(first.ids) < 2000
            assert first.finish is None

    run(case())


def test_logprobs_are_those_of_probabilities(opening: Opening):
    async def case():
        async with opening() as engine:
            reply = await read(engine, PROMPT, Sampling(max_tokens=30, temperature=0.8))
        assert all(x <= 0.0 for x in (*reply.logprobs, *reply.full_logprobs))
        assert reply.logprobs != reply.full_logprobs

    run(case())


def test_untempered_sampling_has_one_logprob(opening: Opening):
    async def case():
        async with opening() as engine:
            reply = await read(engine, PROMPT, Sampling(max_tokens=30))
        assert reply.logprobs == reply.full_logprobs

    run(case())


def test_a_stop_id_ends_the_reply_and_is_kept(opening: Opening):
    async def case():
        async with opening() as engine:
            free = await read(engine, PROMPT, Sampling(max_tokens=20, seed=3))
            stop = free.ids[7]
            ended = await read(engine, PROMPT, Sampling(max_tokens=20, seed=3, stop_ids=(stop,)))
        assert ended.finish == "stop"
        assert ended.ids == free.ids[: free.ids.index(stop) + 1]

    run(case())


def test_stop_id_on_last_allowed_token_is_stop(opening: Opening):
    async def case():
        async with opening() as engine:
            free = await read(engine, PROMPT, Sampling(max_tokens=1, seed=3))
            ended = await read(engine, PROMPT, Sampling(max_tokens=1, seed=3, stop_ids=free.ids))
        assert (free.finish, ended.finish) == ("length", "stop")

    run(case())


def test_a_seed_reproduces_a_reply_whoever_else_is_served(opening: Opening):
    async def case():
        async with opening() as engine:
            alone = await read(engine, PROMPT, Sampling(max_tokens=40, seed=11))
            crowd = await read_all(engine, [PROMPT, [9, 8], [*PROMPT, 6]], Sampling(max_tokens=40, seed=11))
        assert crowd[0].ids == alone.ids

    run(case())


def test_many_requests_are_all_served(opening: Opening):
    async def case():
        async with opening() as engine:
            replies = await read_all(engine, [[1 + i % 7, 2, 3 + i] for i in range(20)], Sampling(max_tokens=9))
        assert all(len(reply.ids) == 9 and reply.finish == "length" for reply in replies)

    run(case())


def test_tokens_carry_the_version_they_were_sampled_under(opening: Opening):
    async def case():
        async with opening() as engine, aclosing(engine.generate(PROMPT, Sampling(max_tokens=2000))) as reply:
            chunks = [await anext(reply)]
            assert engine.version == 0
            await engine.swap(7, lambda: None)
            assert engine.version == 7
            while chunks[-1].versions[-1] == 0:
                chunks.append(await anext(reply))
        versions = joined(chunks).versions
        assert set(versions) == {0, 7}
        assert list(versions) == sorted(versions)

    run(case())


def test_swap_runs_the_change_once(opening: Opening):
    async def case():
        calls: list[int] = []
        async with opening() as engine:
            await engine.swap(1, lambda: calls.append(1))
        assert calls == [1]

    run(case())


def test_change_that_fails_leaves_version_and_reports_caller(opening: Opening):
    def change() -> None:
        raise ZeroDivisionError("no gradient")

    async def case():
        async with opening() as engine:
            with pytest.raises(ZeroDivisionError, match="gradient"):
                await engine.swap(1, change)
            assert engine.version == 0
            assert len((await read(engine, PROMPT, Sampling(max_tokens=5))).ids) == 5

    run(case())


def test_a_closed_reply_does_not_keep_others_from_being_served(opening: Opening):
    async def case():
        async with opening() as engine:
            for _ in range(12):
                async with aclosing(engine.generate(PROMPT, Sampling(max_tokens=2000))) as reply:
                    await anext(reply)
            replies = await read_all(engine, [PROMPT] * 6, Sampling(max_tokens=3))
        assert [len(reply.ids) for reply in replies] == [3] * 6

    run(case())


def test_a_cancelled_reader_does_not_keep_others_from_being_served(opening: Opening):
    async def case():
        async with opening() as engine:
            started = asyncio.Event()

            async def reads() -> None:
                async for _ in engine.generate(PROMPT, Sampling(max_tokens=2000)):
                    started.set()

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(reads()) for _ in range(4)]
                await started.wait()
                for task in tasks:
                    task.cancel()
            assert len((await read(engine, PROMPT, Sampling(max_tokens=3))).ids) == 3

    run(case())


def test_prompt_beyond_context_is_rejected_before_first_chunk(opening: Opening):
    async def case():
        async with opening() as engine:
            with pytest.raises(EngineError, match=str(engine.context_length)):
                await anext(engine.generate([1] * (engine.context_length + 1), Sampling(max_tokens=1)))

    run(case())


def test_the_engine_names_its_model(opening: Opening):
    async def case():
        async with opening() as engine:
            assert engine.model

    run(case())


def test_closing_twice_is_harmless(opening: Opening):
    async def case():
        async with opening() as engine:
            await engine.close()
            await engine.close()

    run(case())
