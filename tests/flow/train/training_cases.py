"""Small decoders and random trees of sequences, for the tests of the trainer's parts."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from penstock.config import TrainSection
from penstock.engines.embedded.decoder import Decoder, DecoderShape, causal
from penstock.records import Sequence
from penstock.train.batches import pack
from penstock.train.learner import Learner, UpdateResult

torch.set_num_threads(1)  # on matrices this small, threads only wait for each other

VOCAB = 40
SHAPE = DecoderShape(
    vocab_size=VOCAB,
    hidden=32,
    inner=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    context_length=128,
)
UNTIED = replace(SHAPE, tied=False, qkv_bias=True, qk_norm=True, kv_heads=4)


def make_decoder(shape: DecoderShape = SHAPE, seed: int = 0) -> Decoder:
    """In float64, so that two ways to the same gradient differ by little more than the float32 logits."""
    torch.manual_seed(seed)
    decoder = Decoder(shape)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return decoder.double()


def random_tree(seed: int, *, groups: int = 3, rollouts: int = 4, system: int = 9) -> list[Sequence]:
    """Several groups of multi-turn rollouts: shared prompts, replies that part late or never, branches, mixed temperatures."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

    made: list[Sequence] = []
    shared = some(system, system)
    for group in range(groups):
        question, usual = some(2, 4), some(3, 5)
        for place in range(rollouts):
            ids, trained = shared + question, [False] * (system + len(question))
            for _ in range(rng.randint(1, 3)):
                reply = usual[: rng.randint(0, 5)] + some(1, 4)
                result = some(1, 3)
                ids, trained = ids + reply + result, trained + [True] * len(reply) + [False] * len(result)
            branch = some(2, 3)
            made.append(_sequence(ids, trained, f"g{group}", f"g{group}.{place}", rng))
            if rng.random() < 0.4:
                made.append(
                    _sequence(ids + branch, [False] * len(ids) + [True] * len(branch), f"g{group}", f"g{group}.{place}", rng)
                )
            if rng.random() < 0.3:
                made.append(replace(made[-1], rollout_id=f"g{group}.{place}.twin"))
    return made


def _sequence(ids: list[int], trained: list[bool], group: str, rollout: str, rng: random.Random) -> Sequence:
    end = len(trained) - trained[::-1].index(True)
    heat, credit = rng.choice([0.7, 1.0, 1.0, 1.3]), rng.choice([-1.5, -0.5, 1.0])
    return Sequence(
        rollout_id=rollout,
        group_id=group,
        token_ids=tuple(ids[:end]),
        trained=tuple(trained[:end]),
        logprobs=tuple(rng.uniform(-6, -1) if flag else 0.0 for flag in trained[:end]),
        temperatures=tuple(heat if flag else 1.0 for flag in trained[:end]),
        advantages=tuple(credit if flag else 0.0 for flag in trained[:end]),
        weight=1.0 / sum(trained),
    )


def section(**changes: object) -> TrainSection:
    """Without gradient clipping, unless asked for."""
    return TrainSection.model_validate({"grad_clip": 1e9, **changes})


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    return {name: value.grad.clone() for name, value in decoder.named_parameters() if value.grad is not None}


def compute(
    learner: Learner, sequences: list[Sequence], *, limit: int, shared: bool, proximal: Tensor | None = None
) -> UpdateResult:
    rollouts = len({sequence.rollout_id for sequence in sequences})
    return learner.compute(pack(sequences, rollouts=rollouts, tokens_per_pass=limit, shared_prefix=shared), proximal)


def plain_logprobs(decoder: Decoder, sequence: Sequence) -> Tensor:
    """[tokens - 1]: of each token but the first, at its temperature, by a forward pass of the whole sequence on its own."""
    ids = torch.tensor([sequence.token_ids])
    hidden = decoder(ids, torch.arange(ids.shape[1]).unsqueeze(0), causal)[0, :-1]
    logits = decoder.logits(hidden) / torch.tensor(sequence.temperatures[1:]).unsqueeze(1)
    return logits.log_softmax(-1).gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1)


def on_policy(decoder: Decoder, sequences: list[Sequence]) -> list[Sequence]:
    """The same sequences, as if `decoder` had just sampled them."""
    made: list[Sequence] = []
    for sequence in sequences:
        with torch.no_grad():
            values = [0.0, *plain_logprobs(decoder, sequence).tolist()]
        logprobs = tuple(value if flag else 0.0 for value, flag in zip(values, sequence.trained, strict=True))
        made.append(replace(sequence, logprobs=logprobs))
    return made
