"""What an audit counts, and what a person reads of it."""

import math
from dataclasses import replace

import pytest

from penstock.cli.verify import SHOWN, as_object, as_text
from penstock.codec import context_digest
from penstock.records import Group, Rollout, Sampling, Step, make_rollout
from penstock.testing import make_group, make_node, make_step
from penstock.train.verify import Audit, ProbedToken, count_versions, make_probes
from penstock.view.formatting import ranges


def audit() -> Audit:
    return Audit(run="demo", channel="train", tolerance=0.001)


def group(*steps: Step) -> Group:
    """One rollout of two roots, the second opened because its history was edited."""
    rollout = make_rollout("train-0", "t", 0)
    root = make_node(rollout.id, 0, (1, 2))
    nodes = (root, replace(root, id=1, token_ids=(1, 5), reason="history_edited"))
    attempt = Rollout(ref=rollout, nodes=nodes, steps=steps)
    return make_group(attempt)


def step(index: int, node: int, *ids: int, version: int = 0, temperature: float = 1.0) -> Step:
    return make_step(
        "train-0.0.1",
        index,
        ids,
        node=node,
        versions=tuple(version for _ in ids),
        sampling=Sampling(temperature=temperature),
        context_digest=context_digest([1, 2 if node == 0 else 5, *ids]),
    )


def test_breaks_masks_and_flaws_are_counted_apart():
    found = audit()
    read = found.add(group(step(0, 0, 3, 4), step(1, 1, 6, temperature=0), replace(step(2, 1, 7, 8), completion_ids=(7, 9))))
    assert (found.sampled_tokens, found.exact_tokens, found.steps) == (5, 3, 3)
    assert found.breaks == {"history_edited": 1}
    assert found.masked == {"greedy": 1, "context_differs": 1}
    assert found.inexact == {"context_differs": 2}
    assert count_versions(read) == {0: 3}


def test_each_token_is_probed_once_under_version_that_sampled_it():
    mixed = replace(step(0, 0, 3, 4), versions=(0, 1))
    read = audit().add(group(mixed, step(1, 0, 3, version=1, temperature=0.5)))
    probes = make_probes(read, 1)
    assert [(token.step, token.place) for each in probes.sequences for token in each.tokens] == [(0, 1), (1, 0)]
    assert [each.sequence.trained for each in probes.sequences] == [(False, False, False, True), (False, False, True)]
    assert probes.sequences[1].sequence.temperatures == (1.0, 1.0, 0.5)


def test_logprob_that_weights_cannot_give_is_infinitely_far_off():
    found = audit()
    found.compare(ProbedToken("r", 0, 0, 0, -0.5), math.nan)
    assert found.status == "inexact" and found.largest and found.largest.deviation == math.inf


def test_steps_that_do_not_hold_are_named_up_to_number():
    found = audit()
    for index in range(SHOWN + 5):
        found.compare(ProbedToken("train-0.0.1", index, 1, 3, -0.5), -1.5)
        found.compare(ProbedToken("train-0.0.1", index, 2, 3, -0.5), -0.75)
    text = as_text(found)
    assert "step 0: logprob_differs, 2 tokens; token 1 recorded -0.5, recomputed -1.5 with version 3" in text
    assert text.count("logprob_differs, ") == SHOWN and "and 5 more steps" in text
    assert len(as_object(found)["findings"]) == SHOWN + 5


def test_an_audit_that_recomputed_nothing_is_unproven():
    found = audit()
    found.add(group(step(0, 0, 3, version=7)))
    found.gone[7] += 1
    text = as_text(found)
    assert "unproven" in text and "the weights of policy version 7 are not on this disk" in text
    assert "breaks      1 history_edited" in text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([4], "4"), ([1, 0], "0-1"), ([9, 3, 5, 4, 0], "0, 3-5, 9"), ([1, 3, 5], "1, 3, 5")]
)
def test_neighbouring_numbers_are_written_as_ranges(numbers: list[int], text: str):
    assert ranges(numbers) == text
