"""Small engines for the engine tests, and a reader of what they sample."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from penstock.chat.tokenizer import Tokenizer
from penstock.engines.base import Engine, SampledChunk
from penstock.engines.embedded.core import EngineCore
from penstock.engines.embedded.decoder import Decoder, DecoderShape, save_decoder
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.paged_core import PagedCore
from penstock.records import Sampling
from penstock.testing import ScriptedEngine, write_tokenizer

VOCAB = 60
SHAPE = DecoderShape(
    vocab_size=VOCAB,
    hidden=32,
    inner=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    context_length=4096,
)
DEADLINE_S = 60.0
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234567"


def make_decoder(seed: int = 0, shape: DecoderShape = SHAPE) -> Decoder:
    """Random weights, large enough that the next token depends on the context."""
    decoder = Decoder(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return decoder


def write_policy(folder: Path, seed: int = 0, shape: DecoderShape = SHAPE, **config: object) -> Path:
    """A model folder as other tools write them, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_decoder(make_decoder(seed, shape), folder)
    names = {"hidden": "hidden_size", "inner": "intermediate_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps", "context_length": "max_position_embeddings"}
    names |= {"vocab_size": "vocab_size", "head_dim": "head_dim", "rope_theta": "rope_theta", "tied": "tie_word_embeddings"}
    fields = {names[key]: value for key, value in asdict(shape).items() if key in names}
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **fields, **config}))
    return folder


def spell(ids: Sequence[int]) -> str:
    """One letter per token."""
    return "".join(LETTERS[i] for i in ids)


@asynccontextmanager
async def embedded(
    *,
    slots: int = 4,
    queue: int = 64,
    seed: int = 0,
    decode: Callable[[Sequence[int]], str] | None = spell,
    stop_ids: Sequence[int] = (),
    paged: bool = False,
) -> AsyncIterator[EmbeddedEngine]:
    """An embedded engine over random weights; `paged`, as on a GPU."""
    make_core = PagedCore if paged else EngineCore
    core = make_core(make_decoder(), slots=slots, cache_tokens=16384, decode=decode)
    engine = EmbeddedEngine(core, name="small", queue_limit=queue, seed=seed, stop_ids=stop_ids)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def scripted(folder: Path) -> AsyncIterator[ScriptedEngine]:
    """A scripted engine that would talk for long."""
    yield ScriptedEngine(lambda prompt: [*range(8, 58)] * 40, Tokenizer.load(write_tokenizer(folder)), context_length=4096)


async def read(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> SampledChunk:
    """The whole reply as one chunk."""
    return joined([chunk async for chunk in engine.generate(prompt, sampling)])


async def read_all(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[SampledChunk]:
    """Replies to all prompts, asked for together."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(engine, prompt, sampling)) for prompt in prompts]
    return [task.result() for task in tasks]


def joined(chunks: Sequence[SampledChunk]) -> SampledChunk:
    """Chunks of one reply as one."""
    return SampledChunk(
        ids=tuple(i for chunk in chunks for i in chunk.ids),
        logprobs=tuple(x for chunk in chunks for x in chunk.logprobs),
        full_logprobs=tuple(x for chunk in chunks for x in chunk.full_logprobs),
        versions=tuple(v for chunk in chunks for v in chunk.versions),
        finish=chunks[-1].finish if chunks else None,
        behaviour_known=all(chunk.behaviour_known for chunk in chunks),
    )


def run(case: Coroutine[None, None, None]) -> None:
    """Run a test's coroutine with a deadline, so that a hang is a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await case

    asyncio.run(bounded())
