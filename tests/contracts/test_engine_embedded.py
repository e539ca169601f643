"""The embedded engine beyond the contract: its limits, its errors, and opening it on a model folder."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB, embedded, joined, make_decoder, read, read_all, run, spell, write_policy

from penstock.config import EngineSection
from penstock.engines import ENGINES
from penstock.engines.embedded.core import EngineCore
from penstock.engines.embedded.engine import EmbeddedEngine, end_ids
from penstock.errors import ConfigError, EngineBusy, EngineError, ModelError
from penstock.records import Sampling

PROMPT = [1, 2, 3, 4, 5]
SHORT, LONG = Sampling(max_tokens=4), Sampling(max_tokens=3000)


def test_full_queue_refuses_and_serves_again_when_it_has_room():
    async def case():
        async with embedded(slots=1, queue=1) as engine:
            async with aclosing(engine.generate(PROMPT, LONG)) as first, aclosing(engine.generate(PROMPT, LONG)) as second:
                await anext(first)
                waits = asyncio.ensure_future(anext(second))
                await asyncio.sleep(0)
                with pytest.raises(EngineBusy, match="requests"):
                    await anext(engine.generate(PROMPT, SHORT))
                await first.aclose()
                await waits
            assert len((await read(engine, PROMPT, SHORT)).ids) == 4

    run(case())


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SHORT, "no tokens"),
        ([1, VOCAB], SHORT, f"outside 0..{VOCAB - 1}"),
        ([-1], SHORT, f"outside 0..{VOCAB - 1}"),
        (PROMPT, replace(SHORT, max_tokens=0), "at least one token"),
        (PROMPT, replace(SHORT, max_tokens=4092), "exceed the context of 4096"),
        (PROMPT, replace(SHORT, temperature=-1.0), "temperature = -1.0"),
        (PROMPT, replace(SHORT, temperature=float("nan")), "temperature = nan"),
        (PROMPT, replace(SHORT, top_p=0.0), "top_p"),
        (PROMPT, replace(SHORT, top_k=-1), "top_k"),
        (PROMPT, replace(SHORT, min_p=1.5), "min_p"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(prompt: list[int], sampling: Sampling, message: str):
    async def case():
        async with embedded() as engine:
            with pytest.raises(EngineError, match=message):
                await anext(engine.generate(prompt, sampling))
            assert len((await read(engine, PROMPT, SHORT)).ids) == 4

    run(case())


def test_a_request_larger_than_the_cache_is_refused():
    async def case():
        engine = EmbeddedEngine(EngineCore(make_decoder(), slots=4, cache_tokens=1024), name="small", queue_limit=1, seed=0)
        with pytest.raises(EngineError, match=r"engine\.cache_tokens"):
            await anext(engine.generate(PROMPT, Sampling(max_tokens=1000)))
        await engine.close()

    run(case())


def test_stop_string_ends_reply_with_tokens_that_complete_it():
    async def case():
        async with embedded() as engine:
            free = await read(engine, PROMPT, Sampling(max_tokens=40, seed=5))
            stop = spell(free.ids)[9:12]
            ended = await read(engine, PROMPT, Sampling(max_tokens=40, seed=5, stop=("#", stop)))
        assert ended.finish == "stop"
        assert spell(ended.ids) == spell(free.ids)[: spell(free.ids).index(stop) + 3]

    run(case())


def test_a_stop_string_in_the_prompt_does_not_count():
    async def case():
        async with embedded() as engine:
            reply = await read(engine, PROMPT, Sampling(max_tokens=1, seed=5, stop=(spell(PROMPT[-2:]),)))
        assert reply.finish == "length"

    run(case())


def test_stop_strings_without_a_tokenizer_are_refused():
    async def case():
        async with embedded(decode=None) as engine:
            with pytest.raises(EngineError, match="tokenizer"):
                await anext(engine.generate(PROMPT, Sampling(stop=("x",))))

    run(case())


def test_a_tokenizer_that_fails_fails_its_request_only():
    def decode(ids: Sequence[int]) -> str:
        raise KeyError("no such token")

    async def case():
        async with embedded(decode=decode) as engine, asyncio.TaskGroup() as group:
            other = group.create_task(read(engine, PROMPT, Sampling(max_tokens=50)))
            with pytest.raises(EngineError, match="KeyError"):
                async for _ in engine.generate(PROMPT, Sampling(stop=("x",)), rollout_id="r1"):
                    pass
        assert len(other.result().ids) == 50

    run(case())


def test_the_models_own_end_ids_end_a_reply():
    async def case():
        async with embedded(stop_ids=range(VOCAB)) as engine:
            reply = await read(engine, PROMPT, SHORT)
        assert (len(reply.ids), reply.finish) == (1, "stop")

    run(case())


def test_requests_without_a_seed_draw_from_the_engines():
    async def replies(seed: int) -> list[tuple[int, ...]]:
        async with embedded(seed=seed) as engine:
            return [(await read(engine, PROMPT, Sampling(max_tokens=20))).ids for _ in range(2)]

    async def case():
        first, again, other = await replies(1), await replies(1), await replies(2)
        assert first == again
        assert len({*first, *other}) == 4

    run(case())


def test_greedy_tokens_are_certain():
    async def case():
        async with embedded() as engine:
            replies = await read_all(engine, [PROMPT, PROMPT], Sampling(max_tokens=20, temperature=0.0))
        assert replies[0].ids == replies[1].ids
        assert set(replies[0].logprobs) == {0.0}
        assert all(x < 0.0 for x in replies[0].full_logprobs)

    run(case())


def test_a_slow_reader_gets_what_piled_up_in_one_chunk():
    async def case():
        async with embedded() as engine, aclosing(engine.generate(PROMPT, Sampling(max_tokens=200))) as slow:
            chunks = [await anext(slow)]
            await read(engine, PROMPT, Sampling(max_tokens=150))
            chunks += [chunk async for chunk in slow]
        assert len(joined(chunks).ids) == 200
        assert max(len(chunk.ids) for chunk in chunks) > 50

    run(case())


def test_failed_step_fails_those_who_were_served_and_engine_continues():
    async def case():
        async with embedded() as engine, aclosing(engine.generate(PROMPT, LONG, rollout_id="r7")) as reply:
            await anext(reply)
            layer = engine.decoder.layers[0].out
            weight = layer.weight
            await engine.swap(1, lambda: setattr(layer, "weight", None))
            with pytest.raises(EngineError, match="r7"):
                async for _ in reply:
                    pass
            await engine.swap(2, lambda: setattr(layer, "weight", weight))
            assert set((await read(engine, PROMPT, SHORT)).versions) == {2}

    run(case())


def test_engine_that_keeps_failing_rejects_later_requests():
    async def case():
        async with embedded() as engine:
            await engine.swap(1, lambda: setattr(engine.decoder.layers[0].out, "weight", None))
            for _ in range(3):
                with pytest.raises(EngineError, match="failed"):
                    await read(engine, PROMPT, SHORT)
            with pytest.raises(EngineError, match="TypeError"):
                await read(engine, PROMPT, SHORT)
            with pytest.raises(EngineError, match="given"):
                await engine.swap(2, lambda: None)

    run(case())


def test_broken_weights_are_an_error_and_not_a_token():
    async def case():
        async with embedded() as engine:
            kept = engine.decoder.embed.weight.detach().clone()
            await engine.swap(1, lambda: engine.decoder.embed.weight.data.fill_(float("nan")))
            with pytest.raises(EngineError, match="logits"):
                await read(engine, PROMPT, SHORT)
            await engine.swap(2, lambda: engine.decoder.embed.weight.data.copy_(kept))
            assert len((await read(engine, PROMPT, SHORT)).ids) == 4

    run(case())


def test_an_optimizer_may_step_inside_a_swap():
    async def case():
        async with embedded() as engine:
            optimizer = torch.optim.AdamW(engine.decoder.parameters(), lr=0.1)
            for version in (1, 2):
                engine.decoder.logits(engine.decoder.embed.weight[:3]).sum().backward()
                await engine.swap(version, optimizer.step)
            assert len((await read(engine, PROMPT, SHORT)).ids) == 4

    run(case())


def test_closing_fails_what_is_running_and_all_later_requests():
    async def case():
        async with embedded() as engine:
            reply = engine.generate(PROMPT, LONG)
            await anext(reply)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                async for _ in reply:
                    pass
            with pytest.raises(EngineError, match="closed"):
                await read(engine, PROMPT, SHORT)

    run(case())


def test_a_reader_whose_loop_is_gone_is_forgotten():
    engine = EmbeddedEngine(EngineCore(make_decoder(), slots=1, cache_tokens=16384), name="small", queue_limit=0, seed=0)
    abandoned = engine.generate(PROMPT, LONG)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(abandoned))
    loop.close()

    async def case():
        reply: list[int] = []
        while not reply:  # refused until the engine has noticed
            with suppress(EngineBusy):
                reply += (await read(engine, PROMPT, SHORT)).ids
            await asyncio.sleep(0)
        assert len(reply) == 4
        await engine.close()

    run(case())


def test_engine_opens_on_model_folder_and_samples_as_weights_say(tmp_path: Path):
    async def case():
        section = EngineSection(slots=4, device="cpu")
        engine = ENGINES.load("embedded")(write_policy(tmp_path), name="mine", section=section, seed=0, decode=spell)
        async with embedded() as same:
            theirs = await read(same, PROMPT, Sampling(max_tokens=20, seed=1))
        ours = await read(engine, PROMPT, Sampling(max_tokens=20, seed=1))
        await engine.close()
        assert (engine.model, ours) == ("mine", theirs)

    run(case())


def test_end_ids_come_from_the_generation_config_and_the_tokenizer(tmp_path: Path):
    assert end_ids(write_policy(tmp_path, eos_token_id=7)) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert end_ids(tmp_path) == {3, 4}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 1, "content": "<s>"}]}')
    assert end_ids(tmp_path) == {3, 4, 9}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="pull"):
        end_ids(tmp_path)


def test_a_device_that_is_not_there_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"engine\.device"):
        ENGINES.load("embedded")(tmp_path, name="mine", section=EngineSection(device="quantum"), seed=0)


def test_cache_too_small_for_its_slots_is_config_error():
    with pytest.raises(ConfigError, match="2048"):
        EngineCore(make_decoder(), slots=64, cache_tokens=1024)
