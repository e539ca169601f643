"""Decode tokens per second of the embedded engine on a GPU, beside vLLM's where it is installed: same model, same prompts, one run.

Prompts of 375 tokens, all different, which share 360 or nothing; replies of 128 tokens at temperature 1, with the log-probability
of each. Prompts are new in every round, so a rate includes the time to compute them. Rounds alternate, medians are compared.
vLLM is in a process of its own, and idle while the engine is measured; without log-probabilities it is faster, which is shown too.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from bench.gpu.update import SHAPES, free
from bench.gpu.vllm_peer import CACHE_BYTES, VllmPeer, write_config
from penstock.config import EmbeddedSection
from penstock.engines.embedded.decoder import Decoder, DecoderShape, load_decoder
from penstock.engines.embedded.engine import EmbeddedEngine, make_core
from penstock.records import Sampling
from penstock.system.processes import relax_gc

PROMPT, SHARED, REPLY = 375, 360, 128
ROUNDS = 3
ENOUGH_S = 6.0
"""vLLM is not asked any more after so many seconds."""


class Row(NamedTuple):
    """One line of the comparison."""

    batch: int
    shared: int
    """Tokens that all prompts have in common."""

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        shared = rng.choices(range(vocabulary), k=self.shared)
        return [shared + rng.choices(range(vocabulary), k=PROMPT - self.shared) for _ in range(self.batch)]


PLAIN_ROW = Row(256, SHARED)


class DecodeRate(NamedTuple):
    """One line of the result; tokens/s, medians. None where vLLM is not installed, or was not asked."""

    model: str
    requests: int
    shared_tokens: int
    ours: float
    vllm: float | None
    vllm_without_logprobs: float | None

    def __str__(self) -> str:
        kind = "shared" if self.shared_tokens else "distinct"
        text = f"decode {self.model}, {self.requests} at once, {kind} prompts: {self.ours:,.0f} tokens/s"
        if self.vllm is not None:
            text += f", vLLM {self.vllm:,.0f}: {self.ours / self.vllm:.2f} x{'' if self.ours >= self.vllm else '  BEHIND'}"
        if self.vllm_without_logprobs is not None:
            text += f"; vLLM without log-probabilities {self.vllm_without_logprobs:,.0f}"
        return text


class DecodePeers(NamedTuple):
    """The vLLMs to compare with. They take a minute or two to start: open them early."""

    smollm2: VllmPeer | None
    qwen3: VllmPeer | None


@contextmanager
def opened_peers(folder: Path) -> Generator[DecodePeers]:
    with ExitStack() as stack:
        shape = Path(stack.enter_context(TemporaryDirectory()))
        write_config(shape, SHAPES["0.6B"])
        yield DecodePeers(*(stack.enter_context(VllmPeer.opened(one)) for one in (folder, shape)))


def main_large() -> list[dict[str, Any]]:
    """The same at the shape of Qwen3-1.7B."""
    relax_gc()
    with TemporaryDirectory() as folder:
        write_config(Path(folder), SHAPES["1.7B"])
        with VllmPeer.opened(Path(folder)) as peer:
            rates = compare("Qwen3-1.7B's shape", _random_decoder(SHAPES["1.7B"]), peer, (1, 32, 256))
    return [rate._asdict() for rate in rates]


def main(folder: Path, peers: DecodePeers | None = None) -> list[dict[str, Any]]:
    if peers is None:
        with opened_peers(folder) as peers:
            return main(folder, peers)
    relax_gc()  # as `penstock` does
    cuda = torch.device("cuda")
    rates = compare("SmolLM2-135M", load_decoder(folder, device=cuda, dtype=torch.bfloat16), peers.smollm2, (1, 32, 256, 1024))
    # With random weights: speed does not depend on them.
    rates += compare("Qwen3-0.6B's shape", _random_decoder(SHAPES["0.6B"]), peers.qwen3, (1, 32, 256))
    return [rate._asdict() for rate in rates]


def compare(name: str, decoder: Decoder, peer: VllmPeer | None, batches: Sequence[int]) -> list[DecodeRate]:
    if peer is not None:
        try:
            print(f"vLLM {peer.wait()}", flush=True)
        except ValueError as cause:
            print(cause, flush=True)
            peer = None
    shape = decoder.shape
    tokens = CACHE_BYTES // (2 * shape.layers * shape.kv_heads * shape.head_dim * decoder.embed.weight.element_size())
    engine = EmbeddedEngine(make_core(decoder, EmbeddedSection(cache_tokens=tokens)), name="bench", queue_limit=4096, seed=0)
    rates: list[DecodeRate] = []
    with asyncio.Runner() as runner:
        for row in (Row(batch, shared) for shared in (SHARED, 0) for batch in batches):
            rates.append(_measure(name, row, decoder.shape.vocab_size, runner, engine, peer))
            print(rates[-1], flush=True)
        runner.run(engine.close())
    del engine
    free()
    return rates


def _measure(
    name: str, row: Row, vocabulary: int, runner: asyncio.Runner, engine: EmbeddedEngine, peer: VllmPeer | None
) -> DecodeRate:
    ours: list[float] = []
    theirs: list[float] = []
    runner.run(_generate(engine, row.prompts(vocabulary, 0), 16))
    if peer is not None:
        peer.generate(row.prompts(vocabulary, 0), 16)
    for seed in range(1, ROUNDS + 1):
        prompts = row.prompts(vocabulary, seed)
        started = time.perf_counter()
        runner.run(_generate(engine, prompts, REPLY))
        ours.append(time.perf_counter() - started)
        if peer is not None and sum(theirs) < ENOUGH_S:
            theirs.append(peer.generate(prompts, REPLY))
    plain = None
    if peer is not None and row == PLAIN_ROW:
        plain = peer.generate(row.prompts(vocabulary, ROUNDS + 1), REPLY, logprobs=False)
    tokens = row.batch * REPLY
    rates = [tokens / statistics.median(times) if times else None for times in (ours, theirs, [plain] if plain else [])]
    return DecodeRate(name, row.batch, row.shared, rates[0] or 0.0, *rates[1:])


async def _generate(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    async def read(prompt: Sequence[int]) -> int:
        return sum([len(chunk.ids) async for chunk in engine.generate(prompt, Sampling(max_tokens=tokens))])

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(prompt)) for prompt in prompts]
    assert all(task.result() == tokens for task in tasks)


def _random_decoder(shape: DecoderShape) -> Decoder:
    torch.manual_seed(0)
    with torch.device("cuda"):
        decoder = Decoder(shape).bfloat16()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.02)
    return decoder
