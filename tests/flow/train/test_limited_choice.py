"""Tokens that were chosen from a part of the vocabulary: sampled, trained and verified under the same distribution."""

import asyncio
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from random_schemas import random_schema
from test_gradients import assert_same
from test_tree_forward import TreeLearner
from training_cases import VOCAB, compute, gradients, make_decoder, random_tree, section

from penstock.chat.renderer import Renderer
from penstock.codec import from_json, to_json
from penstock.config import EmbeddedSection
from penstock.engines.embedded.decoder import causal
from penstock.engines.embedded.engine import open_engine
from penstock.engines.token_sets import pack_set, unpack_sets
from penstock.models.pull import resolve
from penstock.records import End, Grade, Group, Node, ReplyFormat, Rollout, Sampling, Sequence, Step, Task, make_rollout
from penstock.train.batches import pack
from penstock.train.forward import pass_logprobs, trunk_states
from penstock.train.resources import AllowedReplay
from penstock.train.sequences import ReplayedStep, sequences

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}, "c": {"type": "string", "maxLength": 8}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


def limited(tree: list[Sequence], seed: int) -> list[Sequence]:
    """The same with random sets around trained tokens, of some of the sequences."""
    rng = np.random.default_rng(seed)

    def some(token: int, trained: bool) -> bytes:
        kept = rng.random(VOCAB) < rng.choice([0.05, 0.5])
        kept[token] = True
        return pack_set(kept) if trained and rng.random() < 0.8 else b""

    made = [replace(one, allowed=tuple(map(some, one.token_ids, one.trained))) for one in tree]
    return [one if at % 4 else replace(one, allowed=()) for at, one in enumerate(made)]


def test_packed_sets_are_what_was_packed():
    rng = np.random.default_rng(0)
    rows = rng.random((9, 1003)) < np.linspace(0.0, 1.0, 9)[:, None]
    assert (unpack_sets([pack_set(row) for row in rows], 1003) == rows).all()
    assert unpack_sets([b""], 70).all()
    assert (len(pack_set(np.arange(1003) < 3)), len(pack_set(rows[-1]))) == (1 + 12, 1 + 126)


@pytest.mark.parametrize("seed", range(3))
def test_limited_choice_gradients_equal_plain_softmax(seed: int):
    decoder, tree = make_decoder(), limited(random_tree(seed), seed)
    learner = TreeLearner(decoder, section(kl=0.1))
    flat = compute(learner, tree, limit=60, shared=False)
    oracle = gradients(decoder)
    done = compute(learner, tree, limit=40, shared=True)
    assert_same(gradients(decoder), oracle)
    for name in ("loss", "entropy", "kl_reference"):
        assert getattr(done.metrics, name) == pytest.approx(getattr(flat.metrics, name), rel=1e-4, abs=1e-6)


def test_log_probabilities_of_limited_choices_by_hand():
    decoder = make_decoder()
    tree = limited(random_tree(5), 5)
    batch = pack(tree, rollouts=1, tokens_per_pass=50)
    owners = [(one, at) for one in tree for at in range(len(one.token_ids))]
    for pass_set in batch.pass_sets:
        trunk = trunk_states(decoder, pass_set.trunk)
        for one in pass_set.passes:
            values = pass_logprobs(decoder, one, trunk, flat=batch.flat).tolist()
            for term, value in zip(one.terms, values, strict=True):
                sequence, at = owners[term.token]
                ids = torch.tensor([sequence.token_ids[:at]])
                with torch.no_grad():
                    hidden = decoder(ids, torch.arange(at).unsqueeze(0), causal)[0, -1]
                    logits = decoder.logits(hidden) / sequence.temperatures[at]
                [row] = unpack_sets([sequence.allowed[at] if sequence.allowed else b""], VOCAB)
                kept = np.flatnonzero(row)
                assert value == pytest.approx(float(logits[sequence.token_ids[at]] - logits[kept].logsumexp(0)), abs=1e-5)


SAMPLINGS = (Sampling(max_tokens=60), Sampling(max_tokens=60, temperature=0.7), Sampling(max_tokens=60, temperature=1.4))


async def sampled_group(
    model: str, samplings=SAMPLINGS, *, schemas: tuple[dict[str, Any], ...] = (SCHEMA,)
) -> tuple[Group, AllowedReplay, object]:
    """A group whose replies were sampled by a model, under the schemas in turn; with what replays them, and the decoder."""
    if schemas:
        pytest.importorskip("llguidance")
    folder = (await asyncio.to_thread(resolve, model, lambda *_: None)).path
    renderer = Renderer.load(folder)
    engine = open_engine(folder, name=model, section=EmbeddedSection(device="cpu"), seed=0, decode=renderer.tokenizer.decode)
    prompt = renderer.root([{"role": "user", "content": "Some JSON, please."}])
    grammars = [renderer.reply_grammar(ReplyFormat(schema=each), (), frozenset(), prompt=prompt) for each in schemas] or [None]
    attempts: list[Rollout] = []
    try:
        for place, sampling in enumerate(samplings):
            asked = replace(sampling, grammar=grammars[place % len(grammars)], stop_ids=renderer.stop_ids, seed=place)
            chunks = [chunk async for chunk in engine.generate(prompt, asked)]
            rollout = make_rollout("g", "t", place)
            node = Node(rollout_id=rollout.id, id=0, parent=None, token_ids=tuple(prompt), messages_digest="a", messages=())
            step = Step(
                rollout_id=rollout.id,
                index=0,
                node=0,
                transcript="main",
                completion_ids=tuple(i for chunk in chunks for i in chunk.ids),
                logprobs=tuple(x for chunk in chunks for x in chunk.logprobs),
                full_logprobs=tuple(x for chunk in chunks for x in chunk.full_logprobs),
                versions=tuple(v for chunk in chunks for v in chunk.versions),
                kept=tuple(each for chunk in chunks for each in chunk.kept),
                sampling=asked,
                finish=chunks[-1].finish or "error",
                message={"role": "assistant", "content": ""},
                messages_digest="b",
            )
            grade = Grade(rollout_id=rollout.id, reward=float(place), source="test")
            attempts.append(Rollout(ref=rollout, end=End.COMPLETED, nodes=(node,), steps=(step,), grades=(grade,)))
        replay = AllowedReplay(folder, engine.decoder.shape.vocab_size)
        group = Group(id="g", seq=0, task=Task(id="t", prompt=()), channel="train", rollouts=tuple(attempts))
        return group, replay, engine.decoder
    finally:
        await engine.close()


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2-135m", marks=[pytest.mark.slow, pytest.mark.soak])])
def test_engine_and_trainer_agree_on_constrained_log_probabilities(model: str):
    group, replay, decoder = asyncio.run(sampled_group(model))
    made = sequences(group, [1.0, -1.0, 0.5], replay=replay)
    assert made.counts["tokens"] == sum(len(attempt.steps[0].completion_ids) for attempt in group.rollouts)
    assert largest_gap(decoder, made.sequences) < 1e-3  # as `penstock verify` asks in float32


FULL = os.environ.get("PENSTOCK_FAULTS") == "full"
RANDOM = 500 if FULL else 25
AT_ONCE = 25


@pytest.mark.parametrize(
    "model", ["tiny", pytest.param("smollm2-135m", marks=pytest.mark.skipif(not FULL, reason="make test-faults"))]
)
def test_engine_and_trainer_agree_under_random_schemas(model: str):
    for first in range(0, RANDOM, AT_ONCE):
        schemas = tuple(random_schema(random.Random(seed)) for seed in range(first, first + AT_ONCE))
        samplings = [Sampling(max_tokens=100, temperature=(1.0, 0.7, 1.4)[seed % 3]) for seed in range(AT_ONCE)]
        group, replay, decoder = asyncio.run(sampled_group(model, samplings, schemas=schemas))
        made = sequences(group, [1.0] * AT_ONCE, replay=replay)
        assert made.counts["tokens"] == sum(len(attempt.steps[0].completion_ids) for attempt in group.rollouts)
        assert largest_gap(decoder, made.sequences) < 1e-3  # as `penstock verify` asks in float32


TRUNCATED = (
    Sampling(max_tokens=40, top_p=0.9),
    Sampling(max_tokens=40, top_k=12, temperature=0.8),
    Sampling(max_tokens=40, min_p=0.02, temperature=1.3),
)


@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2-135m", marks=[pytest.mark.slow, pytest.mark.soak])])
@pytest.mark.parametrize("grammar", [False, True])
def test_engine_and_trainer_agree_on_truncated_log_probabilities(model: str, grammar: bool):
    group, _, decoder = asyncio.run(sampled_group(model, TRUNCATED, schemas=(SCHEMA,) if grammar else ()))
    steps = [attempt.steps[0] for attempt in group.rollouts]
    assert all(len(step.kept) == len(step.completion_ids) for step in steps)
    assert from_json(Step, to_json(steps[0])) == steps[0]
    made = sequences(group, [1.0, -1.0, 0.5])  # what was kept is in the record: nothing is replayed
    assert made.counts["tokens"] == sum(len(step.completion_ids) for step in steps)
    assert largest_gap(decoder, made.sequences) < 1e-3  # as `penstock verify` asks in float32
    whole = [replace(one, allowed=()) for one in made.sequences]
    assert largest_gap(decoder, whole) > 0.05  # which the whole vocabulary is not


def test_engine_and_trainer_agree_on_what_a_bias_leaves():
    """`logit_bias` of -100 and 100: the tokens that are left share the probability, for the engine as for the trainer."""
    few = tuple(range(40, 60))
    biased = (Sampling(max_tokens=40, banned_ids=few), Sampling(max_tokens=40, only_ids=few, temperature=0.7))
    group, replay, decoder = asyncio.run(sampled_group("tiny", (*biased, Sampling(max_tokens=40)), schemas=()))
    banned, only, _ = [attempt.steps[0] for attempt in group.rollouts]
    assert not set(banned.completion_ids) & set(few) and set(only.completion_ids) <= set(few) and only.finish == "length"
    made = sequences(group, [1.0, -1.0, 0.5], replay=replay)
    assert made.counts["tokens"] == sum(len(attempt.steps[0].completion_ids) for attempt in group.rollouts)
    assert largest_gap(decoder, made.sequences) < 1e-3  # as `penstock verify` asks in float32
    assert largest_gap(decoder, [replace(one, allowed=()) for one in made.sequences]) > 0.05
    assert from_json(Step, to_json(only)) == only
    assert replay(replace(only, completion_ids=banned.completion_ids)) == ReplayedStep(problem="not_allowed")


def test_a_token_outside_of_what_was_kept_is_masked():
    group, _, _ = asyncio.run(sampled_group("tiny", TRUNCATED, schemas=()))
    [step] = group.rollouts[0].steps
    wrong = replace(step, kept=(pack_set(np.zeros(1000, np.bool_)), *step.kept[1:]))
    attempts = (replace(group.rollouts[0], steps=(wrong,)), *group.rollouts[1:])
    assert sequences(replace(group, rollouts=attempts), [1.0, -1.0, 0.5]).counts["masked.not_allowed"] == 1
    short = replace(step, kept=step.kept[1:])
    attempts = (replace(group.rollouts[0], steps=(short,)), *group.rollouts[1:])
    assert sequences(replace(group, rollouts=attempts), [1.0, -1.0, 0.5]).counts["masked.misaligned"] == 1


def largest_gap(decoder: Any, made: list[Sequence]) -> float:
    """The largest difference between recorded and recomputed log-probabilities."""
    batch = pack(made, rollouts=3, tokens_per_pass=1024)
    worst = 0.0
    for pass_set in batch.pass_sets:
        trunk = trunk_states(decoder, pass_set.trunk)
        for one in pass_set.passes:
            values = pass_logprobs(decoder, one, trunk, flat=False).tolist()
            worst = max(worst, *(abs(value - term.logprob) for value, term in zip(values, one.terms, strict=True)))
    return worst


def test_what_cannot_be_replayed_is_masked_and_counted():
    group, replay, _ = asyncio.run(sampled_group("tiny"))
    credit = [1.0, -1.0, 0.5]
    assert sequences(group, credit).counts["masked.constrained"] == 3
    rng = random.Random(0)
    [step, *_] = group.rollouts[0].steps
    changed = replace(step, completion_ids=tuple(rng.sample(step.completion_ids, len(step.completion_ids))))
    assert replay(changed) == ReplayedStep(problem="not_allowed")
    broken = replace(step, sampling=replace(step.sampling, grammar=replace(step.sampling.grammar, lark="start: nothing")))
    assert replay(broken) == ReplayedStep(problem="grammar_unknown")
