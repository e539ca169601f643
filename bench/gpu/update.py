"""One update on a GPU: with shared prefixes, flat, and by transformers, on rollouts of several turns.

Weights and tokens are random, in the shapes of Qwen3: speed does not depend on them. A rollout is a prompt that its group shares,
then replies of 200 tokens with tool results of 300 between them. A rate counts the tokens of all sequences, whether they were
forwarded once or shared: it says how fast a batch is trained.
"""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from penstock.config import TrainSection
from penstock.engines.embedded.decoder import Decoder, DecoderShape
from penstock.records import Sequence
from penstock.train.batches import Batch, pack
from penstock.train.learner import Learner

SMALLEST = DecoderShape(
    vocab_size=151936,
    hidden=1024,
    inner=3072,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    context_length=40960,
    rope_theta=1e6,
    qk_norm=True,
)
SHAPES = {
    "0.6B": SMALLEST,
    "1.7B": replace(SMALLEST, hidden=2048, inner=6144),
    "4B": replace(SMALLEST, hidden=2560, inner=9728, layers=36, heads=32),
}
PROMPT, REPLY, RESULT = 1024, 200, 300
FLAT_TOKENS_PER_PASS = 16384
ENOUGH_S = 5.0
"""An update is not repeated a third time after so many seconds."""


class Workload(NamedTuple):
    groups: int
    rollouts: int
    turns: int


WORKLOADS = {"8 turns": Workload(2, 8, 8), "20 turns": Workload(1, 16, 20)}
LONG = Workload(1, 4, 63)
"""Rollouts of 32k tokens: whether they fit into memory at all. Without checkpoints, as in the flat path, one does not at 4B."""


class Measured(NamedTuple):
    tokens_per_s: float
    gigabytes: float
    first_s: float
    """Of the first pass, with compilation."""
    halvings: int = 0
    """How often memory ran out, so that passes are smaller than they should be."""


def main(names: list[str]) -> list[dict[str, Any]]:
    """Returns the figures of each row, for the shapes of the given names."""
    started, figures = time.perf_counter(), list[dict[str, Any]]()
    for name in names:
        shape = SHAPES[name]
        learner = make_learner(shape)
        for title, workload in WORKLOADS.items():
            sequences = make_sequences(workload, shape.vocab_size)
            tree = measure(learner, sequences, shared=True)
            flat = measure(learner, sequences, shared=False)
            told = [f"tree {_told(tree)}", f"flat {_told(flat)}", f"tree / flat {tree.tokens_per_s / flat.tokens_per_s:.2f}"]
            figures.append({"model": name, "workload": title, "tree": tree._asdict(), "flat": flat._asdict()})
            if (name, title) == ("0.6B", "8 turns"):
                peer = measure_transformers(shape, sequences)
                figures[-1]["transformers"] = peer._asdict()
                told.append(f"transformers {_told(peer)}")
            told.append(f"first pass {tree.first_s:.0f} s")
            print(f"update {name}, {title}: " + ", ".join(told), flush=True)
        if name == "4B":
            long = measure(learner, make_sequences(LONG, shape.vocab_size), shared=True, repeats=1)
            figures.append({"model": name, "workload": "rollouts of 32k tokens", "tree": long._asdict()})
            print(f"update {name}, rollouts of 32k tokens: tree {_told(long)}", flush=True)
        del learner
        free()
    print(f"all updates took {time.perf_counter() - started:.0f} s", flush=True)
    return figures


def _told(one: Measured) -> str:
    halved = f", passes halved {one.halvings} times" if one.halvings else ""
    return f"{one.tokens_per_s / 1000:.1f}k sequence tokens/s ({one.gigabytes:.0f} GiB{halved})"


def make_learner(shape: DecoderShape, **settings: Any) -> Learner:
    torch.manual_seed(0)
    with torch.device("cuda"):
        decoder = Decoder(shape).bfloat16()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.02)
    return Learner(decoder, TrainSection(**settings))


def make_sequences(workload: Workload, vocabulary: int) -> list[Sequence]:
    rng = random.Random(0)
    turn = [True] * REPLY + [False] * RESULT
    trained = [False] * PROMPT + (turn * workload.turns)[:-RESULT]
    made: list[Sequence] = []
    for group in range(workload.groups):
        prompt = rng.choices(range(vocabulary), k=PROMPT)
        for place in range(workload.rollouts):
            made.append(
                Sequence(
                    rollout_id=f"bench-{group}.{place}.1",
                    group_id=f"bench-{group}",
                    token_ids=tuple(prompt + rng.choices(range(vocabulary), k=len(trained) - PROMPT)),
                    trained=tuple(trained),
                    logprobs=tuple(-11.9 if flag else 0.0 for flag in trained),
                    temperatures=(1.0,) * len(trained),
                    advantages=tuple((-1.0) ** place if flag else 0.0 for flag in trained),
                    weight=1.0 / sum(trained),
                )
            )
    return made


def measure(learner: Learner, sequences: list[Sequence], *, shared: bool, repeats: int = 3) -> Measured:
    rollouts, memory = len(sequences), learner._memory  # pyright: ignore[reportPrivateUsage]
    assert memory is not None  # there is a GPU
    memory.halvings = 0  # those of an earlier measurement

    def batch() -> Batch:
        if shared:
            return learner.pack(sequences, rollouts=rollouts)
        limit = FLAT_TOKENS_PER_PASS >> memory.halvings
        return pack(sequences, rollouts=rollouts, tokens_per_pass=limit, shared_prefix=False)

    def update(batch: Batch) -> None:
        learner.compute(batch)
        learner.apply()

    def first_pass() -> None:
        whole = batch()
        [first, *_] = whole.pass_sets
        update(replace(whole, pass_sets=(replace(first, passes=first.passes[:1]),)))

    measured = _measure(first_pass, lambda: update(batch()), sequences, repeats)
    return measured._replace(halvings=memory.halvings)


def measure_transformers(shape: DecoderShape, sequences: list[Sequence], repeats: int = 1) -> Measured:
    """A sequence a pass, as its trainers do without further settings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_length,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def update(sequences: list[Sequence]) -> None:
        for sequence in sequences:
            ids = torch.tensor([sequence.token_ids], device="cuda")
            trained = torch.tensor(sequence.trained, device="cuda")[1:]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1][trained]
            torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:][trained]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _measure(lambda: update(sequences[:1]), lambda: update(sequences), sequences, repeats)


def _measure(first: Callable[[], None], update: Callable[[], None], sequences: list[Sequence], repeats: int) -> Measured:
    free()
    torch.cuda.reset_peak_memory_stats()
    first_s = seconds(first)
    gc.collect()
    gc.freeze()  # else Python walks again and again through what compilation left behind
    spent: list[float] = []
    while len(spent) < repeats and (len(spent) < 2 or sum(spent) < ENOUGH_S):
        spent.append(seconds(update))
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    return Measured(tokens / median(spent), torch.cuda.max_memory_allocated() / 2**30, first_s)


def seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
