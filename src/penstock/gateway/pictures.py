"""Pictures for engines whose models see them: kept beside the pool, asked about once, and placed in prompts.

A server puts many tokens into the place of the one that a chat template writes for a picture. It is asked for these tokens before
anything is sampled, so that prompts are known and recorded as the model gets them.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.chat.media import PICTURE, Picture, parts_of, pictures_of, read_picture
from penstock.chat.renderer import PICTURED, Renderer
from penstock.engines.base import PictureEngine, RenderedPicture, SampledChunk, SentPicture
from penstock.errors import EngineRefused, PoolError
from penstock.gateway.call import ModelCall, PictureTokens, Prompt
from penstock.pool.pictures import PictureStore
from penstock.records import Message, PlacedPicture, Sampling

MAX_KNOWN = 1024
"""Pictures whose tokens are kept."""

log = logging.getLogger(__name__)


class PlacedIds(NamedTuple):
    """Rendered ids with the tokens of their pictures."""

    ids: tuple[int, ...]
    pictures: tuple[PlacedPicture, ...]


class PictureReader:
    """Finds out how pictures get into the prompts of one model."""

    def __init__(self, engine: PictureEngine, renderer: Renderer, store: PictureStore) -> None:
        self._engine = engine
        self._renderer = renderer
        self._store = store
        self._known = OrderedDict[str, PictureTokens]()
        self._told: set[str] = set()

    async def read(self, call: ModelCall) -> ModelCall:
        """The call with a digest in place of each picture that the model can be shown; other pictures stay as they are."""
        if not any(map(parts_of, call.messages)):
            return call
        shown: dict[str, PictureTokens] = {}
        messages = tuple([await self._read_message(message, shown) for message in call.messages])
        return replace(call, messages=messages, pictures=shown)

    async def generate(self, prompt: Prompt, sampling: Sampling, *, rollout_id: str) -> AsyncGenerator[SampledChunk, None]:
        """Sample a reply after a prompt with pictures."""
        pictures = await self._sent(prompt.pictures)
        async with aclosing(self._engine.generate(prompt.ids, sampling, rollout_id=rollout_id, pictures=pictures)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _sent(self, pictures: Sequence[PlacedPicture]) -> list[SentPicture]:
        def read(picture: PlacedPicture) -> SentPicture:
            return SentPicture(picture, self._stored(picture.digest, picture.media_type).url)

        return await asyncio.to_thread(lambda: list(map(read, pictures)))

    def _stored(self, digest: str, media_type: str) -> Picture:
        return Picture(media_type, self._store.read(digest), digest)

    async def _read_message(self, message: Message, shown: dict[str, PictureTokens]) -> Message:
        parts = [await self._read_part(part, shown) for part in parts_of(message)]
        return {**message, "content": parts} if parts else message

    async def _read_part(self, part: dict[str, Any], shown: dict[str, PictureTokens]) -> dict[str, Any]:
        """A part that stands for a picture; else the part as it is."""
        if "text" in part:
            return part
        try:
            if part["type"] == PICTURE:  # of a recorded conversation
                picture = await asyncio.to_thread(self._stored, part["digest"], part["media_type"])
            else:
                picture = await asyncio.to_thread(read_picture, part)
            if picture is None:
                return part
            shown[picture.digest] = await self._tokens(picture)
        except (EngineRefused, PoolError) as refusal:
            self._tell(f"a picture is not passed on: {refusal}")
            return unseen(part)
        return {"type": PICTURE, "digest": picture.digest, "media_type": picture.media_type}

    async def _tokens(self, picture: Picture) -> PictureTokens:
        """EngineRefused if the picture cannot be shown."""
        digest = picture.digest
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return known
        found = tokens_of(await self._engine.render_picture(picture.url), self._renderer.root([PICTURED]))
        if not await asyncio.to_thread(self._store.put, picture.content):
            raise EngineRefused("the run's folder of pictures is full")
        self._known[digest] = found
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return found

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            log.warning("%s; the model reads a line of text in its place", text)


def tokens_of(rendered: RenderedPicture, own: Sequence[int]) -> PictureTokens:
    """The tokens of a picture, where the server's prompt and our own (`own`) differ in them alone; EngineRefused if in more."""
    ids, first, size = rendered
    if first >= len(own) or (*own[:first], *ids[first : first + size], *own[first + 1 :]) != ids:
        raise EngineRefused("the server renders a message with a picture otherwise than the chat template in the model's folder")
    return PictureTokens(own[first], ids[first : first + size])


def unseen(part: dict[str, Any]) -> dict[str, Any]:
    """A part whose picture the model is not shown."""
    return {"type": "image_url", "image_url": {"url": f"sha256:{part['digest']}"}} if part["type"] == PICTURE else part


def without_pictures(call: ModelCall) -> ModelCall:
    """The call without pictures in results of tools, which not every template can show; without any if none are there."""
    kept = ("user",) if any(message["role"] != "user" for message in call.messages if pictures_of([message])) else ()
    messages = tuple(message if message["role"] in kept else _without_pictures(message) for message in call.messages)
    return replace(call, messages=messages)


def _without_pictures(message: Message) -> Message:
    return {**message, "content": list(map(unseen, message["content"]))} if pictures_of([message]) else message


def place(ids: tuple[int, ...], messages: Sequence[Message], known: Mapping[str, PictureTokens]) -> PlacedIds | None:
    """`ids`, which render the messages, with the tokens of their pictures; None if the template does not show all of them once."""
    parts = pictures_of(messages)
    if not parts:
        return PlacedIds(ids, ())
    marks = {known[part["digest"]].token for part in parts}
    places = [at for at, token in enumerate(ids) if token in marks]
    if len(places) != len(parts) or any(ids[at] != known[part["digest"]].token for at, part in zip(places, parts, strict=True)):
        return None
    placed, pictures, end = list[int](), list[PlacedPicture](), 0
    for at, part in zip(places, parts, strict=True):
        tokens, digest = known[part["digest"]], part["digest"]
        placed += ids[end:at]
        size, token = len(tokens.ids), tokens.token
        pictures.append(PlacedPicture(digest=digest, media_type=part["media_type"], first=len(placed), size=size, token=token))
        placed += tokens.ids
        end = at + 1
    return PlacedIds((*placed, *ids[end:]), tuple(pictures))
