"""The most likely tokens that come with each sampled one are those of a plain forward pass, on both cores."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("llguidance")

from penstock.chat.renderer import Renderer
from penstock.engines.base import SampledChunk
from penstock.engines.embedded import lanes
from penstock.engines.embedded.core import EngineCore
from penstock.engines.embedded.decoder import causal, load_decoder
from penstock.engines.embedded.engine import EmbeddedEngine, end_ids
from penstock.engines.embedded.paged_core import PagedCore
from penstock.engines.embedded.sampling import GrammarCompiler
from penstock.errors import EngineError
from penstock.models.pull import resolve
from penstock.records import ReplyFormat, Sampling

FOLDER = resolve("tiny", lambda *_: None).path
RENDERER = Renderer.load(FOLDER)
PROMPT = RENDERER.root([{"role": "user", "content": "3 * 4"}])
CHOICE = {"enum": [True, False]}
GRAMMAR = RENDERER.reply_grammar(ReplyFormat(schema=CHOICE), (), frozenset(), prompt=PROMPT)
SAMPLINGS = [
    Sampling(max_tokens=12, top_logprobs=5),
    Sampling(max_tokens=9),
    Sampling(max_tokens=12, top_logprobs=20, temperature=0.7),
    Sampling(max_tokens=12, top_logprobs=1, temperature=0.0),
    Sampling(max_tokens=12, top_logprobs=3, top_p=0.8),
]


@dataclass
class Repeated:
    """Stands in for a captured graph, which needs a GPU."""

    replay: Callable[[], None]


def engine(core: EngineCore | PagedCore) -> EmbeddedEngine:
    grammars = GrammarCompiler(FOLDER, core.decoder.shape.vocab_size)
    return EmbeddedEngine(core, name="tiny", queue_limit=64, seed=0, stop_ids=end_ids(FOLDER), grammars=grammars)


def paged(graphs: bool) -> EmbeddedEngine:
    return engine(PagedCore(load_decoder(FOLDER), slots=8, cache_tokens=4096, graphs=graphs, max_steps=3))


def plain(_: bool) -> EmbeddedEngine:
    return engine(EngineCore(load_decoder(FOLDER), slots=8, cache_tokens=4096))


async def replies(served: EmbeddedEngine, samplings: list[Sampling]) -> list[list[SampledChunk]]:
    async def one(sampling: Sampling) -> list[SampledChunk]:
        return [chunk async for chunk in served.generate(PROMPT, sampling)]

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(replace(sampling, seed=at))) for at, sampling in enumerate(samplings)]
        return [task.result() for task in tasks]
    finally:
        await served.close()


def logprobs_of(ids: list[int]) -> torch.Tensor:
    """Of a plain forward pass, [tokens, vocab]: those that each of `ids` was drawn from."""
    decoder = load_decoder(FOLDER)
    whole = torch.tensor([[*PROMPT, *ids[:-1]]])
    with torch.inference_mode():
        hidden = decoder(whole, torch.arange(whole.shape[1])[None], causal)
        return decoder.logits(hidden[0, len(PROMPT) - 1 :]).double().log_softmax(-1)


@pytest.mark.parametrize(("make", "graphs"), [(plain, False), (paged, False), (paged, True)])
def test_they_are_the_likeliest_of_the_plain_distribution(
    make: Callable[[bool], EmbeddedEngine], graphs: bool, monkeypatch: pytest.MonkeyPatch
):
    def capture(_: lanes.Lanes, work: Callable[[], None]) -> Repeated:
        work()  # as the real one does, to warm up
        return Repeated(work)

    monkeypatch.setattr(lanes.Lanes, "_capture_work", capture)  # CUDA has no stand-in on a CPU
    for sampling, chunks in zip(SAMPLINGS, asyncio.run(replies(make(graphs), SAMPLINGS)), strict=True):
        ids = [token_id for chunk in chunks for token_id in chunk.ids]
        reported = [likely for chunk in chunks for likely in chunk.most_likely]
        if not sampling.top_logprobs:
            assert reported == []
            continue
        assert len(reported) == len(ids)
        for token_id, likely, row in zip(ids, reported, logprobs_of(ids), strict=True):
            values, best = row.topk(sampling.top_logprobs)
            assert [logprob for _, logprob in likely] == pytest.approx(values.tolist(), abs=1e-4)
            assert [row[other].item() for other, _ in likely] == pytest.approx(values.tolist(), abs=1e-4)
            assert sampling.temperature > 0 or likely[0][0] == token_id == best[0]


@pytest.mark.parametrize("make", [plain, paged])
def test_under_a_grammar_only_what_it_allows_is_reported(make: Callable[[bool], EmbeddedEngine]):
    bound = Sampling(max_tokens=8, top_logprobs=20, grammar=GRAMMAR, stop_ids=RENDERER.stop_ids)
    chunks, _ = asyncio.run(replies(make(False), [bound, Sampling(max_tokens=8)]))
    reported = [likely for chunk in chunks for likely in chunk.most_likely]
    sampled = [pair for chunk in chunks for pair in zip(chunk.ids, chunk.full_logprobs, strict=True)]
    assert len(reported) == len(sampled) > 1 and min(map(len, reported)) < 20
    for (token_id, logprob), likely in zip(sampled, reported, strict=True):
        assert dict(likely)[token_id] == pytest.approx(logprob, abs=1e-9)
        assert sum(torch.tensor([value for _, value in likely]).exp()) == pytest.approx(1.0, abs=1e-5)


def test_more_than_twenty_are_refused():
    with pytest.raises(EngineError, match="top_logprobs"):
        asyncio.run(_refused())


async def _refused() -> None:
    served = plain(False)
    try:
        await anext(served.generate(PROMPT, Sampling(top_logprobs=21)))
    finally:
        await served.close()
