"""Decode tokens per second of the embedded engine on a GPU, beside vLLM's where it is installed: same model, same prompts, one run.

Prompts of 375 tokens, all different, which share 360 or nothing; replies of 128 tokens at temperature 1, with the log-probability
of each. Prompts are new in every round, so a rate includes the time to compute them. Rounds alternate, medians are compared.
vLLM is in a process of its own, and idle while the engine is measured; without log-probabilities it is faster, which is shown too.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from bench.gpu.update import SHAPES
from bench.gpu.vllm_peer import VllmPeer, write_config
from penstock.config import EmbeddedSection
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.engines.embedded.engine import EmbeddedEngine, make_core
from penstock.engines.embedded.weights import load_decoder
from penstock.records import Sampling

PROMPT, SHARED, REPLY = 375, 360, 128
ROUNDS = 3


class Row(NamedTuple):
    """One line of the comparison."""

    batch: int
    shared: int
    """Tokens that all prompts have in common."""

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        shared = rng.choices(range(vocabulary), k=self.shared)
        return [shared + rng.choices(range(vocabulary), k=PROMPT - self.shared) for _ in range(self.batch)]


def main(folder: Path) -> None:
    compare_smollm2(folder)
    compare_qwen3()


def compare_smollm2(folder: Path) -> None:
    compare("SmolLM2-135M", load_decoder(folder, device=torch.device("cuda"), dtype=torch.bfloat16), folder, (1, 32, 256, 1024))


def compare_qwen3() -> None:
    """With random weights: speed does not depend on them."""
    with TemporaryDirectory() as folder:
        write_config(Path(folder), SHAPES["0.6B"])
        compare("Qwen3-0.6B's shape", _random_decoder(SHAPES["0.6B"]), Path(folder), (1, 32, 256))


def compare(name: str, decoder: Decoder, folder: Path, batches: Sequence[int]) -> None:
    with VllmPeer.opened(folder) as peer:
        core = make_core(decoder, EmbeddedSection())
        engine = EmbeddedEngine(core, name="bench", queue_limit=4096, seed=0)
        with asyncio.Runner() as runner:
            for row in (Row(batch, shared) for shared in (SHARED, 0) for batch in batches):
                ours: list[float] = []
                theirs: list[float] = []
                runner.run(_generate(engine, row.prompts(decoder.shape.vocab_size, 0), 16))
                if peer is not None:
                    peer.generate(row.prompts(decoder.shape.vocab_size, 0), 16)
                for seed in range(1, ROUNDS + 1):
                    prompts = row.prompts(decoder.shape.vocab_size, seed)
                    started = time.perf_counter()
                    runner.run(_generate(engine, prompts, REPLY))
                    ours.append(time.perf_counter() - started)
                    if peer is not None:
                        theirs.append(peer.generate(prompts, REPLY))
                plain: float | None = None
                if peer is not None and row.shared:
                    plain = peer.generate(row.prompts(decoder.shape.vocab_size, ROUNDS + 1), REPLY, logprobs=False)
                _tell(name, row, ours, theirs, plain)
            runner.run(engine.close())


def _tell(name: str, row: Row, ours: Sequence[float], theirs: Sequence[float], plain: float | None) -> None:
    tokens = row.batch * REPLY
    mine = statistics.median(ours)
    told = f"decode {name}, {row.batch} at once, {'shared' if row.shared else 'distinct'} prompts: {tokens / mine:,.0f} tokens/s"
    if theirs:
        other = statistics.median(theirs)
        told += f", vLLM {tokens / other:,.0f}: {other / mine:.2f} x"
        told += "" if plain is None else f"; vLLM without log-probabilities {tokens / plain:,.0f}"
        told += "" if other >= mine else "  BEHIND"
    print(told, flush=True)


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
