"""The prefix tree: what is shared, what is split, what is dropped when room runs out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.embedded.kv_cache import KeyValues, PrefixTree, Segment


def computed(tokens: list[int] | tuple[int, ...]) -> KeyValues:
    """Stand-in keys and values that name their token."""
    row = torch.tensor(tokens, dtype=torch.float32)
    return KeyValues(row.view(1, 1, 1, -1), row.view(1, 1, -1, 1))


def compute(tree: PrefixTree, leaf: Segment) -> None:
    for segment in leaf.path():
        if not segment.ready:
            segment.kv = computed(segment.tokens)


def texts(leaf: Segment | None) -> list[tuple[int, ...]]:
    assert leaf is not None
    return [segment.tokens for segment in leaf.path()]


def planned(tree: PrefixTree, *tokens: int) -> Segment:
    leaf = tree.plan(tokens)
    assert leaf is not None
    return leaf


def test_prompts_share_the_segment_of_their_common_prefix():
    tree = PrefixTree(capacity=100, longest=50)
    first = planned(tree, 1, 2, 3, 4)
    second = planned(tree, 1, 2, 5)
    assert (texts(first), texts(second)) == ([(1, 2), (3, 4)], [(1, 2), (5,)])
    assert first.path()[0] is second.path()[0]
    assert tree.tokens == 5


def test_a_split_divides_keys_and_values():
    tree = PrefixTree(capacity=100, longest=50)
    first = planned(tree, 1, 2, 3, 4)
    compute(tree, first)
    second = planned(tree, 1, 2, 5)
    upper, lower = first.path()
    assert upper.kv is not None and lower.kv is not None
    assert (upper.kv.keys.flatten().tolist(), lower.kv.values.flatten().tolist()) == ([1, 2], [3, 4])
    assert [segment.ready for segment in second.path()] == [True, False]


def test_long_prompts_are_chained_segments():
    assert texts(PrefixTree(capacity=100, longest=3).plan(range(7))) == [(0, 1, 2), (3, 4, 5), (6,)]


def test_one_token_has_an_empty_path():
    tree = PrefixTree(capacity=100, longest=3)
    leaf = tree.plan([])
    assert texts(leaf) == []
    assert leaf is tree.root


def test_released_plans_vanish_but_not_what_others_planned():
    tree = PrefixTree(capacity=100, longest=50)
    first, second = planned(tree, 1, 2, 3), planned(tree, 1, 2, 4)
    tree.release(first)
    assert tree.tokens == 3
    tree.release(second)
    assert tree.tokens == 0


def test_room_is_made_by_dropping_the_least_recently_used():
    tree = PrefixTree(capacity=6, longest=50)
    for tokens in ((1, 1), (2, 2), (3, 3), (1, 1)):
        leaf = planned(tree, *tokens)
        compute(tree, leaf)
        tree.release(leaf)
    planned(tree, 4, 4)
    assert sorted(tree.root.children) == [1, 3, 4]


def test_what_is_held_is_not_dropped():
    tree = PrefixTree(capacity=4, longest=50)
    held = planned(tree, 1, 2)
    compute(tree, held)
    assert tree.plan((3, 4, 5)) is None
    assert tree.plan((1, 2, 3, 4, 5)) is None
    assert (texts(held), tree.tokens) == ([(1, 2)], 2)
    tree.release(held)
    assert texts(tree.plan((3, 4, 5))) == [(3, 4, 5)]


def test_a_reply_is_kept_below_its_prompt():
    tree = PrefixTree(capacity=100, longest=50)
    prompt = planned(tree, 1, 2)
    compute(tree, prompt)
    leaf = tree.extend(prompt, (3, 4), computed((3, 4)))
    assert leaf is not None
    assert (texts(leaf), prompt.holders, leaf.holders) == ([(1, 2), (3, 4)], 0, 1)
    assert all(segment.ready for segment in planned(tree, 1, 2, 3).path())


def test_a_reply_fills_what_another_request_planned():
    tree = PrefixTree(capacity=100, longest=50)
    prompt = planned(tree, 1, 2)
    compute(tree, prompt)
    other = planned(tree, 1, 2, 3, 4, 5)
    tree.extend(prompt, (3, 4), computed((3, 4)))
    assert [(segment.tokens, segment.ready) for segment in other.path()] == [((1, 2), True), ((3, 4), True), ((5,), False)]


def test_a_reply_without_room_leaves_everything_as_it_was():
    tree = PrefixTree(capacity=3, longest=50)
    prompt = planned(tree, 1, 2)
    compute(tree, prompt)
    assert tree.extend(prompt, (3, 4), computed((3, 4))) is None
    assert (prompt.holders, tree.tokens) == (1, 2)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["plan", "compute", "release", "extend"]), st.lists(st.integers(0, 2), max_size=9)), max_size=40
    )
)
def test_paths_always_spell_their_prompts_within_the_capacity(script: list[tuple[str, list[int]]]):
    tree = PrefixTree(capacity=25, longest=4)
    held: list[tuple[list[int], Segment]] = []
    for action, tokens in script:
        if action == "plan" and (leaf := tree.plan(tokens)) is not None:
            held.append((tokens, leaf))
        elif action == "compute" and held:
            compute(tree, held[0][1])
        elif action == "release" and held:
            tree.release(held.pop(0)[1])
        elif action == "extend" and held and tokens:
            before, leaf = held.pop()
            compute(tree, leaf)
            longer = tree.extend(leaf, tokens, computed(tokens))
            held.append((before, leaf) if longer is None else (before + tokens, longer))
        check(tree, held)


def check(tree: PrefixTree, held: list[tuple[list[int], Segment]]) -> None:
    ahead, total = [tree.root], 0
    while ahead:
        segment = ahead.pop()
        total += len(segment.tokens)
        ahead += segment.children.values()
        assert len(segment.tokens) <= tree.longest
        if segment.kv is not None:
            assert segment.kv.keys.flatten().tolist() == list(segment.tokens)
    assert total == tree.tokens <= tree.capacity
    for tokens, leaf in held:
        assert [token for segment in leaf.path() for token in segment.tokens] == tokens
        assert [segment.start for segment in leaf.path()] == [s.end - len(s.tokens) for s in leaf.path()]
