import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.records import Sequence
from penstock.train.batches import Batch, Pass, PassRow, PassSet, pack


def sequence(ids: tuple[int, ...], trained: int, *, group: str = "g", temperature: float = 1.0, advantage: float = 1.0) -> Sequence:
    """The last `trained` tokens are trained; a token's logprob distinguishes it from all others."""
    flags = tuple(place >= len(ids) - trained for place in range(len(ids)))
    return Sequence(
        rollout_id="r",
        group_id=group,
        token_ids=ids,
        trained=flags,
        logprobs=tuple(-float(place) if flag else 0.0 for place, flag in enumerate(flags)),
        temperatures=tuple(temperature if flag else 1.0 for flag in flags),
        advantages=tuple(advantage if flag else 0.0 for flag in flags),
        weight=0.5,
    )


def contexts(batch: Batch) -> list[tuple[tuple[int, ...], int, float]]:
    """What the layout makes of each term: the tokens that predict it, read through rows, spans and trunk; target; logprob."""
    return sorted(
        (_read(pass_set, one, term.at), term.target, term.logprob)
        for pass_set in batch.pass_sets
        for one in pass_set.passes
        for term in one.terms
    )


def _read(pass_set: PassSet, one: Pass, at: int) -> tuple[int, ...]:
    (row,) = (row for row in one.rows if row.start <= at < row.stop)
    spans = [one.ids[start:stop] for start, stop in (*row.spans, (row.start, at + 1))]
    whole = (*pass_set.trunk, *(token for span in spans for token in span))
    assert one.positions[at] == len(whole) - 1
    return whole


def expected(sequences: list[Sequence]) -> list[tuple[tuple[int, ...], int, float]]:
    return sorted(
        (s.token_ids[:place], s.token_ids[place], s.logprobs[place])
        for s in sequences
        for place, flag in enumerate(s.trained)
        if flag
    )


ids = st.lists(st.integers(0, 2), min_size=2, max_size=12).map(tuple)
many = st.lists(st.tuples(ids, st.integers(1, 6), st.sampled_from("gh")), min_size=1, max_size=12)


@given(many, st.integers(1, 40), st.booleans())
def test_every_trained_token_is_predicted_once_from_its_own_context(
    drawn: list[tuple[tuple[int, ...], int, str]], limit: int, shared: bool
):
    given = [sequence(tokens, min(trained, len(tokens) - 1), group=group) for tokens, trained, group in drawn]
    batch = pack(given, rollouts=3, tokens_per_pass=limit, shared_prefix=shared)
    assert contexts(batch) == expected(given)
    assert batch.trained_tokens == sum(sum(s.trained) for s in given)
    for one in (one for pass_set in batch.pass_sets for one in pass_set.passes):
        assert len(one.ids) <= limit or len(one.rows) == 1
        assert [row.start for row in one.rows] == [0, *(row.stop for row in one.rows[:-1])]


@given(many, st.integers(1, 40))
def test_sharing_never_forwards_more_than_the_flat_layout(drawn: list[tuple[tuple[int, ...], int, str]], limit: int):
    given = [sequence(tokens, min(trained, len(tokens) - 1), group=group) for tokens, trained, group in drawn]
    shared, flat = (pack(given, rollouts=1, tokens_per_pass=limit, shared_prefix=flag) for flag in (True, False))
    assert shared.forwarded_tokens <= flat.forwarded_tokens == sum(len(s.token_ids) - 1 for s in given)


def test_what_fits_in_one_pass_is_tree_without_trunk():
    given = [sequence((1, 2, 3, 4, 5), 2), sequence((1, 2, 3, 6, 7), 2), sequence((1, 8, 9), 1)]
    (pass_set,) = pack(given, rollouts=3, tokens_per_pass=100).pass_sets
    assert pass_set.trunk == ()
    (one,) = pass_set.passes
    assert one.ids == (1, 2, 3, 4, 6, 8)
    assert one.positions == (0, 1, 2, 3, 3, 1)
    assert one.rows == (
        PassRow(start=0, stop=4),
        PassRow(start=4, stop=5, spans=((0, 3),)),
        PassRow(start=5, stop=6, spans=((0, 1),)),
    )
    assert [(term.at, term.target) for term in one.terms] == [(2, 4), (2, 6), (3, 5), (4, 7), (5, 9)]


def test_identical_sequences_are_forwarded_once_and_trained_each():
    batch = pack([sequence((1, 2, 3), 2), sequence((1, 2, 3), 2)], rollouts=2, tokens_per_pass=100)
    assert batch.forwarded_tokens == 2 and batch.trained_tokens == 4


def test_a_reply_inside_another_ones_prompt_shares_its_tokens():
    given = [sequence((1, 2, 3, 4, 5), 1), sequence((1, 2, 3), 1)]
    assert pack(given, rollouts=1, tokens_per_pass=100).forwarded_tokens == 4


def test_what_adds_no_token_needs_no_new_pass():
    given = [sequence((1, 2, 3, 9, 10 + n), 2) for n in range(4)]
    (pass_set,) = pack(given, rollouts=4, tokens_per_pass=1).pass_sets
    assert [one.ids for one in pass_set.passes] == [(1, 2, 3, 9)]


def test_several_passes_share_a_trunk_that_predicts_nothing_trained():
    (pass_set,) = pack([sequence((1, 2, 3, n, n), 2) for n in range(4)], rollouts=4, tokens_per_pass=2).pass_sets
    assert pass_set.trunk == (1, 2)  # the token 3 predicts what is trained first
    assert [one.ids for one in pass_set.passes] == [(3, 0), (3, 1), (3, 2), (3, 3)]


def test_groups_stay_apart_where_that_forwards_less():
    prompts = {"g": (1, *range(10, 20)), "h": (1, *range(20, 30))}
    given = [sequence((*prompt, 90 + n, 1, 1, 1), 3, group=name) for name, prompt in prompts.items() for n in range(4)]
    batch = pack(given, rollouts=8, tokens_per_pass=5)
    assert [pass_set.trunk for pass_set in batch.pass_sets] == list(prompts.values())


def test_groups_share_a_trunk_where_that_forwards_less():
    given = [sequence((*range(50), n, m, 1), 1, group="gh"[n]) for n in range(2) for m in range(4)]
    (pass_set,) = pack(given, rollouts=8, tokens_per_pass=4).pass_sets
    assert pass_set.trunk == tuple(range(50))


def test_terms_at_one_place_are_distinguished_by_temperature():
    given = [sequence((1, 2), 1, temperature=0.5), sequence((1, 2), 1), sequence((1, 3), 1, temperature=0.5)]
    (pass_set,) = pack(given, rollouts=3, tokens_per_pass=10).pass_sets
    assert [(term.target, term.temperature) for term in pass_set.passes[0].terms] == [(2, 0.5), (3, 0.5), (2, 1.0)]


def test_flat_passes_are_bounded_with_their_padding():
    given = [sequence(tuple(range(n)), 1) for n in (11, 4, 3, 11, 2)]
    (pass_set,) = pack(given, rollouts=1, tokens_per_pass=20, shared_prefix=False).pass_sets
    assert [[row.stop - row.start for row in one.rows] for one in pass_set.passes] == [[10, 10], [3, 2, 1]]


@pytest.mark.parametrize("shared", [True, False])
def test_nothing_to_train_is_an_empty_batch(shared: bool):
    batch = pack([], rollouts=0, tokens_per_pass=10, shared_prefix=shared)
    assert batch.pass_sets == () and batch.trained_tokens == 0 and batch.forwarded_tokens == 0
