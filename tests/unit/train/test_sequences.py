import math
from dataclasses import replace

import pytest

from penstock.codec import context_digest
from penstock.errors import TrainError
from penstock.records import End, Grade, Group, Mark, Node, PlacedPicture, Rollout, Sampling, Step, Task, make_rollout
from penstock.train.sequences import behaviour_unknown_tokens, breaks, exactness, read_graph, sequences

NAN = math.nan


def node(number: int, parent: int | None, *ids: int) -> Node:
    return Node(rollout_id="r", id=number, parent=parent, token_ids=ids, messages_digest="", messages=())


def step(index: int, at: int, *ids: int, **changes: object) -> Step:
    made = Step(
        rollout_id="r",
        index=index,
        node=at,
        transcript="main",
        completion_ids=ids,
        logprobs=tuple(-0.5 for _ in ids),
        versions=tuple(3 for _ in ids),
        sampling=Sampling(temperature=0.7),
        finish="stop",
        message={},
        messages_digest="",
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def attempt(nodes: list[Node], steps: list[Step], *, place: int = 0, reward: float | None = 1.0) -> Rollout:
    rollout = make_rollout("train-0", "t", place)
    grades = () if reward is None else (Grade(rollout_id=rollout.id, reward=reward, source="test"),)
    end = End.TIMEOUT if reward is None else End.COMPLETED
    return Rollout(ref=rollout, end=end, nodes=tuple(nodes), steps=tuple(steps), grades=grades)


def group(*attempts: Rollout) -> Group:
    return Group(id="train-0", seq=0, task=Task(id="t", prompt=()), channel="train", rollouts=attempts)


def two_turns(**changes: object) -> Rollout:
    return attempt([node(0, None, 1, 2), node(1, 0, 5, 6)], [step(0, 0, 3, 4), step(1, 1, 7, **changes)])


def branches() -> Rollout:
    """Two tool results after the same reply: one root, three replies."""
    return attempt(
        [node(0, None, 1, 2), node(1, 0, 5), node(2, 0, 6)],
        [step(0, 0, 3, 4), step(1, 1, 7), step(2, 2, 8, 9)],
    )


def hashed(made: Rollout, *contexts: tuple[int, ...]) -> Rollout:
    """With the digest of what the engine saw and sampled in each step."""
    steps = tuple(replace(s, context_digest=context_digest(ids)) for s, ids in zip(made.steps, contexts, strict=True))
    return replace(made, steps=steps)


def sound() -> Rollout:
    return hashed(branches(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 7), (1, 2, 3, 4, 6, 8, 9))


def test_a_conversation_is_one_sequence_that_trains_every_reply():
    result = sequences(group(two_turns()), [2.0])
    (only,) = result.sequences
    assert only.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert only.trained == (False, False, True, True, False, False, True)
    assert only.logprobs == (0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -0.5)
    assert only.temperatures == (1.0, 1.0, 0.7, 0.7, 1.0, 1.0, 0.7)
    assert only.advantages == (0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 2.0)
    assert only.versions == (-1, -1, 3, 3, -1, -1, 3)
    assert result.counts["tokens"] == 3 and result.counts["rollouts"] == 1


def test_reply_on_two_paths_is_trained_on_first_only():
    first, second = sequences(group(branches()), [1.0]).sequences
    assert (first.token_ids, second.token_ids) == ((1, 2, 3, 4, 5, 7), (1, 2, 3, 4, 6, 8, 9))
    assert first.trained == (False, False, True, True, False, True)
    assert second.trained == (False, False, False, False, False, True, True)


def test_each_rollout_weighs_the_same_however_many_sequences_and_tokens():
    short = attempt([node(0, None, 1)], [step(0, 0, 2)], place=1)
    result = sequences(group(branches(), short), [1.0, -1.0])
    share = {"train-0.0.1": 0.0, "train-0.1.1": 0.0}
    for sequence in result.sequences:
        share[sequence.rollout_id] += sequence.weight * sum(sequence.trained)
    assert share == pytest.approx({"train-0.0.1": 1.0, "train-0.1.1": 1.0})


def test_a_divisor_replaces_the_rollouts_own_token_count():
    made = sequences(group(branches()), [1.0], divisor=50.0).sequences
    assert [sequence.weight for sequence in made] == [1 / 50, 1 / 50]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish": "cancelled"}, "cancelled"),
        ({"finish": "error"}, "error"),
        ({"sampling": Sampling(temperature=0)}, "greedy"),
        ({"completion_ids": (), "logprobs": (), "versions": ()}, "empty"),
        ({"logprobs": ()}, "misaligned"),
        ({"versions": (1, 2)}, "misaligned"),
        ({"logprobs": (NAN,)}, "bad_logprob"),
        ({"logprobs": (0.5,)}, "bad_logprob"),
        ({"completion_ids": (-1,)}, "bad_token"),
        ({"node": 9}, "context_missing"),
        ({"behaviour_known": False}, "behaviour_unknown"),
    ],
)
def test_a_step_that_cannot_be_trained_is_masked_and_counted(changes: dict[str, object], reason: str):
    result = sequences(group(two_turns(**changes)), [1.0])
    assert result.counts[f"masked.{reason}"] == 1
    assert [sequence.token_ids for sequence in result.sequences] == [(1, 2, 3, 4)]
    assert result.counts["tokens"] == 2 and result.sequences[0].weight == 1 / 2


def test_unknown_behaviour_is_trained_if_recomputed():
    result = sequences(group(two_turns(behaviour_known=False)), [1.0], recompute=True)
    (only,) = result.sequences
    assert only.logprobs == (0.0, 0.0, -0.5, -0.5, 0.0, 0.0, 0.0) and only.trained[-1]
    assert only.recomputed == (*[False] * 6, True)
    assert (result.counts["tokens"], result.counts["recomputed_tokens"]) == (3, 1)
    assert behaviour_unknown_tokens(two_turns(behaviour_known=False), two_turns()) == 1


def test_replies_after_a_picture_are_masked():
    seen = PlacedPicture(digest="0" * 64, media_type="image/png", first=0, size=1, token=9)
    pictured = replace(node(1, 0, 4), pictures=(seen,))
    made = attempt([node(0, None, 1), pictured, node(2, 1, 6)], [step(0, 0, 2, 3), step(1, 1, 5), step(2, 2, 7)])
    result = sequences(group(made), [1.0])
    assert [sequence.token_ids for sequence in result.sequences] == [(1, 2, 3)]
    assert (result.counts["masked.picture_in_context"], result.counts["tokens"]) == (2, 2)
    assert exactness(made).rate == 1.0
    assert read_graph(made).descendants(1) == [1, 2]


def test_a_masked_reply_is_still_context_of_what_follows():
    made = attempt([node(0, None, 1), node(1, 0, 4)], [step(0, 0, 2, 3, finish="cancelled"), step(1, 1, 5)])
    (only,) = sequences(group(made), [1.0]).sequences
    assert only.token_ids == (1, 2, 3, 4, 5)
    assert only.trained == (False, False, False, False, True)


def test_zero_advantage_rollouts_count_in_the_mean():
    result = sequences(group(two_turns(), replace(two_turns(), ref=make_rollout("train-0", "t", 1))), [0.0, 1.0])
    assert {sequence.rollout_id for sequence in result.sequences} == {"train-0.1.1"}
    assert result.counts["masked.zero_advantage"] == 2 and result.counts["rollouts"] == 2


def test_a_group_without_any_advantage_is_skipped_and_counted():
    result = sequences(group(two_turns(), two_turns()), [0.0, 0.0])
    assert result.sequences == []
    assert result.counts["groups_equal"] == 1 and result.counts["rollouts"] == 0


def test_failed_rollouts_are_counted_and_leave_no_sequence():
    failed = attempt([node(0, None, 1)], [step(0, 0, 2)], reward=None)
    result = sequences(group(failed, two_turns()), [1.0])
    assert result.counts["ungraded"] == 1 and len(result.sequences) == 1
    assert sequences(group(failed), []).counts["groups_ungraded"] == 1


def test_new_roots_in_one_rollout_are_sequences_of_their_own():
    made = attempt([node(0, None, 1), node(1, None, 1, 9)], [step(0, 0, 2), step(1, 1, 3)])
    assert [sequence.token_ids for sequence in sequences(group(made), [1.0]).sequences] == [(1, 2), (1, 9, 3)]


def test_several_replies_to_one_prompt_are_branches():
    made = attempt([node(0, None, 1)], [step(0, 0, 2), step(1, 0, 3), step(2, 0, 2)])
    assert [sequence.token_ids for sequence in sequences(group(made), [1.0]).sequences] == [(1, 2), (1, 3), (1, 2)]


@pytest.mark.parametrize("advantages", [[], [1.0, 2.0], [NAN]])
def test_unusable_advantages_are_refused(advantages: list[float]):
    with pytest.raises(TrainError, match="train-0"):
        sequences(group(two_turns()), advantages)


def test_a_sound_record_is_exact_in_every_token():
    assert exactness(branches()) == (5, 5, {}, 5)


def test_damaged_reply_spoils_itself_and_what_was_sampled_after_it():
    made = branches()
    steps = (replace(made.steps[0], logprobs=(-0.5,)), *made.steps[1:])
    result = exactness(replace(made, steps=steps))
    assert (result.exact_tokens, result.sampled_tokens) == (0, 5)
    assert result.inexact == {"misaligned": 2, "context_flawed": 3}


def test_lost_ids_lower_exactness_although_they_are_gone():
    made = two_turns()
    result = exactness(replace(made, steps=(made.steps[0], replace(made.steps[1], completion_ids=()))))
    assert (result.exact_tokens, result.sampled_tokens) == (2, 3)


def test_reply_that_claims_to_follow_later_one_has_no_context():
    made = attempt([node(0, None, 1), node(1, 5, 2)], [step(0, 1, 3), step(5, 0, 4)])
    assert exactness(made).inexact == {"context_missing": 1}
    assert [sequence.token_ids for sequence in sequences(group(made), [1.0]).sequences] == [(1, 4)]


def test_a_reply_without_any_prompt_is_not_trained():
    assert exactness(attempt([node(0, None)], [step(0, 0, 3)])).inexact == {"context_missing": 1}


def test_contexts_that_are_recorded_ones_are_exact_on_every_branch():
    assert exactness(sound()) == (5, 5, {}, 0)
    assert sequences(group(sound()), [1.0]).counts["tokens"] == 5


@pytest.mark.parametrize("where", ["prompt", "reply", "glue"])
def test_changed_id_masks_every_later_reply(where: str):
    made = sound()
    nodes, steps = list(made.nodes), list(made.steps)
    if where == "reply":
        steps[0] = replace(steps[0], completion_ids=(3, 5))
    else:
        at, ids = (0, (1, 3)) if where == "prompt" else (2, (7,))
        nodes[at] = replace(nodes[at], token_ids=ids)
    changed = replace(made, nodes=tuple(nodes), steps=tuple(steps))
    lost = 2 if where == "glue" else 5
    assert exactness(changed).inexact == {"context_differs": lost}
    counts = sequences(group(changed), [1.0]).counts
    assert counts["masked.context_differs"] == (1 if where == "glue" else 3) and counts["tokens"] == 5 - lost


def test_a_reply_moved_to_another_prompt_is_masked():
    made = sound()
    moved = replace(made, steps=(*made.steps[:2], replace(made.steps[2], node=1)))
    assert exactness(moved).inexact == {"context_differs": 2}


def test_steps_recorded_without_digest_are_checked_by_structure_and_shown():
    made = sound()
    older = replace(made, steps=(replace(made.steps[0], context_digest=""), *made.steps[1:]))
    assert exactness(older) == (5, 5, {}, 2)
    assert sequences(group(older), [1.0]).counts["tokens"] == 5


def test_what_follows_damaged_reply_is_exact_where_digest_reports_it():
    made = sound()
    damaged = replace(made, steps=(replace(made.steps[0], logprobs=(NAN, -0.5)), *made.steps[1:]))
    assert exactness(damaged) == (3, 5, {"bad_logprob": 2}, 0)
    assert [sequence.trained.count(True) for sequence in sequences(group(damaged), [1.0]).sequences] == [1, 2]


@pytest.mark.parametrize("bad", [-1, 2**31, 2**70])
def test_invalid_ids_are_rejected(bad: int):
    made = sound()
    changed = replace(made, steps=(replace(made.steps[0], completion_ids=(3, bad)), *made.steps[1:]))
    assert exactness(changed).inexact == {"bad_token": 2, "context_missing": 3}


def test_breaks_are_counted_by_reason_and_leave_tokens_exact():
    made = attempt([node(0, None, 1), replace(node(1, None, 1, 9), reason="history_edited")], [step(0, 0, 2), step(1, 1, 3)])
    assert breaks(made, made) == {"history_edited": 2}
    assert exactness(made, made) == (4, 4, {}, 4) and exactness(made).rate == 1.0


def test_where_nothing_was_sampled_there_is_no_rate():
    assert exactness().rate is None


def marked(made: Rollout, *marks: Mark) -> Rollout:
    return replace(made, marks=marks)


def test_curators_weight_scales_credit_of_rollout_and_of_step():
    curated = marked(two_turns(), Mark(rollout_id="r", quality=0.5), Mark(rollout_id="r", step=1, quality=3.0))
    (only,) = sequences(group(curated), [2.0]).sequences
    assert only.advantages == (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 3.0)


def test_a_step_that_a_curator_took_out_is_context_only():
    curated = marked(two_turns(), Mark(rollout_id="r", step=0, trainable=False))
    result = sequences(group(curated), [2.0])
    (only,) = result.sequences
    assert (only.trained, result.counts["masked.curated"]) == ((False,) * 6 + (True,), 1)


def test_a_rollout_that_a_curator_took_out_counts_for_nobody():
    out = marked(attempt([node(0, None, 1)], [step(0, 0, 3)], place=1, reward=9.0), Mark(rollout_id="r", trainable=False))
    both = group(two_turns(), out)
    result = sequences(both, [2.0])
    assert both.rewards == [1.0]
    assert ({each.rollout_id for each in result.sequences}, result.counts["curated"]) == ({"train-0.0.1"}, 1)


def test_second_replies_are_trained_once_each():
    nodes = [node(turn, 2 * turn - 2 if turn else None, 10 * turn) for turn in range(4)]
    steps = [step(2 * turn + n, turn, 10 * turn + 1 + n, versions=(turn,)) for turn in range(4) for n in range(2)]
    made = sequences(group(attempt(nodes, steps)), [1.0]).sequences
    assert [sequence.token_ids for sequence in made] == [
        (0, 2),
        (0, 1, 10, 12),
        (0, 1, 10, 11, 20, 22),
        (0, 1, 10, 11, 20, 21, 30, 31),
        (0, 1, 10, 11, 20, 21, 30, 32),
    ]
    assert [sequence.versions for sequence in made] == [
        (-1, 0),
        (-1, 0, -1, 1),
        (-1, -1, -1, 1, -1, 2),
        (-1, -1, -1, -1, -1, 2, -1, 3),
        (-1, -1, -1, -1, -1, -1, -1, 3),
    ]
    assert all(sequence.trained == tuple(version >= 0 for version in sequence.versions) for sequence in made)


def test_credit_by_step_reaches_the_tokens_of_that_step_alone():
    (only,) = sequences(group(two_turns()), [{1: 3.0}]).sequences
    assert only.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert only.advantages == (0, 0, 0, 0, 0, 0, 3.0)
    assert [at for at, trained in enumerate(only.trained) if trained] == [6]
    assert only.steps == (-1, -1, -1, -1, -1, -1, 1)
    assert only.weight == pytest.approx(1 / 3)  # the tokens without credit count in the mean: one step weighs no more for them


def test_credit_by_transcript_reaches_all_steps_of_it():
    made = two_turns(transcript="other")
    (only,) = sequences(group(made), [{"main": 1.0, "other": -2.0}]).sequences
    assert only.advantages == (0, 0, 1.0, 1.0, 0, 0, -2.0) and only.steps == (-1, -1, 0, 0, -1, -1, 1)


def test_steps_without_credit_are_counted():
    result = sequences(group(two_turns()), [{0: 1.0}])
    assert result.counts["masked.zero_advantage"] == 1 and result.counts["tokens"] == 2


def test_group_without_any_step_credit_is_one_of_equal_reward():
    assert sequences(group(two_turns()), [{0: 0.0}]).counts["groups_equal"] == 1


def test_tokens_whose_credit_comes_later_are_kept():
    (only,) = sequences(group(two_turns()), [0.0], without_credit=True).sequences
    assert sum(only.trained) == 3 and not any(only.advantages)
