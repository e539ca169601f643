"""Trained tokens per second with shared prefixes over the flat path, on the demo's shapes.

The demo trains 4 groups of 8 two-turn rollouts: prompts of 375 tokens that all tasks share 360 of, a reply of 30 tokens, a tool
result of 25 and an answer of 5. Weights and tokens are random, in SmolLM2-135M's shape: speed does not depend on them. Random
replies share nothing, where the demo's begin alike and often are the same, so the ratio is a floor. The flat path runs half a
group only, as every rollout costs it the same.
"""

import random
import resource
import time

import torch

from penstock.config import TrainSection
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.records import Sequence
from penstock.train.batches import CPU_TOKENS_PER_PASS, Batch, pack
from penstock.train.learner import Learner

SHAPE = DecoderShape(
    vocab_size=49152,
    hidden=576,
    inner=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    context_length=2048,
    rope_theta=100000.0,
)
SYSTEM, QUESTION, REPLY, RESULT, ANSWER = 360, 15, 30, 25, 5
GROUPS, ROLLOUTS = 4, 8


def main() -> None:
    decoder = _decoder()
    learner = Learner(decoder, TrainSection())
    learner.compute(_batch(_sequences(1)[:1], shared=True))  # first calls are slow, whatever they compute
    flat_rate, flat_s, flat = _rate(learner, _batch(_sequences(1)[: ROLLOUTS // 2], shared=False))
    rate, seconds, batch = _rate(learner, _batch(_sequences(GROUPS), shared=True))
    started = time.perf_counter()
    learner.apply()
    apply_s = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"training: {rate / flat_rate:.2f} x trained tokens/s with shared prefixes over the flat path (aim: 2)")
    print(f"  shared: {rate:.1f} trained tokens/s, {_told(batch)}, {seconds:.1f} s an update")
    print(f"  flat:   {flat_rate:.1f} trained tokens/s, {_told(flat)}, {flat_s:.1f} s")
    print(f"  optimizer step {apply_s:.2f} s, peak memory {peak:.1f} GB, {torch.get_num_threads()} threads")


def _told(batch: Batch) -> str:
    return f"{batch.rollouts} rollouts, {batch.trained_tokens} tokens trained, {batch.forwarded_tokens} forwarded"


def _rate(learner: Learner, batch: Batch) -> tuple[float, float, Batch]:
    started = time.perf_counter()
    learner.compute(batch)
    seconds = time.perf_counter() - started
    return batch.trained_tokens / seconds, seconds, batch


def _batch(sequences: list[Sequence], *, shared: bool) -> Batch:
    return pack(sequences, rollouts=len(sequences), tokens_per_pass=CPU_TOKENS_PER_PASS, shared_prefix=shared)


def _decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(SHAPE)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.02)
    return decoder


def _sequences(groups: int) -> list[Sequence]:
    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return [rng.randrange(SHAPE.vocab_size) for _ in range(count)]

    system = some(SYSTEM)
    trained = [False] * (SYSTEM + QUESTION) + [True] * REPLY + [False] * RESULT + [True] * ANSWER
    made: list[Sequence] = []
    for group in range(groups):
        prompt = system + some(QUESTION)
        for place in range(ROLLOUTS):
            made.append(
                Sequence(
                    rollout_id=f"bench-{group}.{place}.1",
                    group_id=f"bench-{group}",
                    token_ids=tuple(prompt + some(REPLY + RESULT + ANSWER)),
                    trained=tuple(trained),
                    logprobs=tuple(-10.8 if flag else 0.0 for flag in trained),
                    temperatures=tuple(1.0 for _ in trained),
                    advantages=tuple((-1.0) ** place if flag else 0.0 for flag in trained),
                    weight=1.0 / (REPLY + ANSWER),
                )
            )
    return made


if __name__ == "__main__":
    main()
