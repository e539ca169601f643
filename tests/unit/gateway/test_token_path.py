from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.base import TokenPath

PARTS = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=5)
PLACE = st.none() | st.integers(-12, 12)


@given(PARTS, PLACE, PLACE, st.none() | st.sampled_from((-2, -1, 1, 2)))
def test_a_path_behaves_as_the_tuple_of_its_tokens(parts, start, stop, step):
    path, flat = TokenPath(*parts), tuple(token for part in parts for token in part)
    assert (len(path), tuple(path), list(path)) == (len(flat), flat, list(flat))
    assert path[start:stop:step] == flat[start:stop:step]
    assert [path[place] for place in range(-len(flat), len(flat))] == [*flat, *flat]
    assert (path == flat, path == TokenPath(flat), path == (*flat, 1), hash(path)) == (True, True, False, hash(flat))


@given(PARTS, st.integers(0, 5))
def test_path_continues_and_stays_unchanged(parts, known):
    path = TokenPath(*parts[:known])
    before = tuple(path)
    longer = path
    for part in parts[known:]:
        longer = longer.then(part)
    assert longer == TokenPath(*parts) and tuple(path) == before
    assert path.then((1, 2)) == (*before, 1, 2)


def test_no_token_lies_past_the_end():
    path = TokenPath((), (1, 2), ())
    for place in (2, -3):
        try:
            path[place]
        except IndexError:
            continue
        raise AssertionError(place)
