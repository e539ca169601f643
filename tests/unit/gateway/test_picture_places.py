"""Where the tokens of pictures lie in a prompt, there and back."""

from typing import Any

import pytest

from penstock.chat.media import pictures_of
from penstock.engines.base import RenderedPicture
from penstock.engines.servers.vllm import collapsed
from penstock.errors import EngineRefused
from penstock.gateway.prompt import place, tokens_of, without_pictures
from penstock.gateway.request import ModelCall, PictureTokens
from penstock.records import Sampling

MARK = 9
KNOWN = {"a": PictureTokens(MARK, (9, 9, 8)), "b": PictureTokens(MARK, (7,))}


def message(role: str, *digests: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "picture", "digest": digest, "media_type": "image/png"} for digest in digests]}


def test_each_picture_gets_tokens_in_order_and_gives_them_back():
    ids = (1, MARK, 2, MARK, MARK, 3)
    placed = place(ids, [message("user", "a"), message("user", "b", "a")], KNOWN)
    assert placed is not None
    assert placed.ids == (1, 9, 9, 8, 2, 7, 9, 9, 8, 3)
    assert [(picture.digest, picture.first, picture.size) for picture in placed.pictures] == [("a", 1, 3), ("b", 5, 1), ("a", 6, 3)]
    assert collapsed([*placed.ids, MARK], placed.pictures) == [*ids, MARK]  # one that was sampled after all pictures stays


@pytest.mark.parametrize("ids", [(1, 2), (1, MARK, MARK), ()])
def test_ids_that_miss_a_picture_are_not_placed(ids: tuple[int, ...]):
    assert place(ids, [message("user", "a")], KNOWN) is None


def test_ids_without_pictures_stay_as_they_are_whatever_they_hold():
    assert place((1, MARK), [{"role": "user", "content": "text"}], {}) == ((1, MARK), ())


def test_token_that_stands_for_picture_is_rejected_before_one():
    placed = place((MARK, 2, MARK), [message("user", "b", "a")], KNOWN)
    assert placed is not None
    with pytest.raises(EngineRefused, match="picture"):
        collapsed((7, MARK, *placed.ids[2:]), placed.pictures)


def test_pictures_of_tools_are_dropped_before_those_of_users():
    call = ModelCall(model="any", messages=(message("user", "a"), message("tool", "b")), sampling=Sampling())
    fewer = without_pictures(call)
    assert [part["digest"] for part in pictures_of(fewer.messages)] == ["a"]
    assert fewer.messages[1]["content"] == [{"type": "image_url", "image_url": {"url": "sha256:b"}}]
    assert pictures_of(without_pictures(fewer).messages) == []


def test_a_server_that_renders_otherwise_is_found_out():
    assert tokens_of(RenderedPicture((1, 5, 5, 2), 1, 2), (1, MARK, 2)) == (MARK, (5, 5))
    for own in ((1, MARK, 3), (0, MARK, 2), (1, MARK, 2, 2), (1,)):
        with pytest.raises(EngineRefused, match="otherwise"):
            tokens_of(RenderedPicture((1, 5, 5, 2), 1, 2), own)
