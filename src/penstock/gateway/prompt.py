"""Making a call's prompt: the tokens of the longest known path plus the new ones, or a root rendered from scratch."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from penstock.chat.media import PICTURE, Picture, parts_of, pictures_of, read_picture
from penstock.chat.renderer import PICTURED, Renderer
from penstock.chat.templates import flatten
from penstock.codec import pack_ints
from penstock.engines.base import Engine, PictureEngine, RenderedPicture, SampledChunk, SentPicture, TokenPath
from penstock.errors import EngineRefused, PoolError, RequestError
from penstock.gateway.graph import RAW_CHAIN, TEMPLATE_REWRITES, TokenGraph
from penstock.gateway.request import ModelCall, PictureTokens, Prompt
from penstock.pool.rows import PictureStore
from penstock.records import Message, PlacedPicture, Sampling

LONG_TEXT = 8_000
"""Characters from which tokenizing runs in a thread; it takes about 0.5 ms per thousand."""
MAX_ROOT_TOKENS = 2_000_000
"""Tokens of all roots that are kept, 40 bytes each."""
PIECE_CHARACTERS, PIECE_TOKENS = 1 << 16, 8
"""How texts are cut to count their tokens, and how many tokens a cut may add."""


class ContextBound:
    """Refuses texts that are longer than the model's context before they are tokenized as a whole, which takes 150 bytes of memory
    for each of theirs."""

    def __init__(self, renderer: Renderer, engine: Engine) -> None:
        self._encode = renderer.encode_raw
        self._engine = engine

    def check(self, texts: Sequence[str]) -> None:
        """RequestError 400 if their tokens cannot fit. What may fit by its length alone is not counted."""
        room = self._engine.context_length
        if sum(map(len, texts)) <= 4 * room:
            return
        text = "\n".join(texts)
        for start in range(0, len(text), PIECE_CHARACTERS):
            room -= len(self._encode(text[start : start + PIECE_CHARACTERS])) - PIECE_TOKENS
            if room < 0:
                raise self.error(f"more than {self._engine.context_length}")

    def check_ids(self, ids: Sequence[int]) -> None:
        if len(ids) >= self._engine.context_length:
            raise self.error(len(ids))

    def error(self, tokens: int | str) -> RequestError:
        text = f"the prompt has {tokens} tokens; the model's context holds {self._engine.context_length} with the reply"
        return RequestError(text, code="context_length_exceeded", param="messages")


class RootCache:
    """Caches the tokens of roots: all rollouts of a group start with the same one."""

    def __init__(self, renderer: Renderer, bound: ContextBound, max_tokens: int = MAX_ROOT_TOKENS) -> None:
        self._renderer = renderer
        self._bound = bound
        self._left = max_tokens
        self._known = OrderedDict[str, tuple[int, ...]]()

    async def render(self, call: ModelCall, chain: str, *, first: bool) -> tuple[int, ...]:
        """Token ids of the call's whole conversation; `first`: the rollout has made no call before.

        Conversations without replies are cached by `chain`. It leaves out details of replies that a template may
        render: where a rollout's first call has some, such as worked examples, all of it is the key.
        """
        key = chain
        if any(message["role"] not in ("system", "user") for message in call.messages):
            key = _whole_digest(call) if first else ""
        known = self._known.get(key)
        if known is not None:
            return known
        texts = [*_texts(call.messages), *([orjson.dumps(call.tools).decode()] if call.tools else [])]
        ids = await _render(texts, self._bound, lambda: self._renderer.root(call.messages, call.tools))
        if key and key not in self._known:
            self._known[key] = ids
            self._left -= len(ids)
            while self._left < 0:
                self._left += len(self._known.popitem(last=False)[1])
        return ids


def _whole_digest(call: ModelCall) -> str:
    """A digest of all that a template may render; empty if it cannot be taken."""
    try:
        return blake2b(orjson.dumps((call.messages, call.tools)), digest_size=16).hexdigest()
    except TypeError:  # an integer beyond 64 bits
        return ""


async def make_prompt(
    graph: TokenGraph, renderer: Renderer, roots: RootCache, bound: ContextBound, call: ModelCall, chains: Sequence[str]
) -> Prompt:
    """The prompt of `call`; `chains` are the digests of its tools and messages. RequestError 400 if `bound` refuses it."""
    if call.raw is not None:
        return await _make_raw(graph, renderer, bound, call.raw, call.policy)
    prompt = await _make_templated(graph, renderer, roots, bound, call, chains)
    if call.prefill and call.forced is not None:
        text = "a reply that the caller has begun cannot begin with a tool call; leave out tool_choice or the last message"
        raise RequestError(text, code="invalid_value", param="tool_choice")
    if call.prefill:
        ids, _ = renderer.begin_text(call.prefill, prompt=prompt.ids)
        return replace(prompt, ids=prompt.ids.then(ids), added=prompt.added + ids)
    return prompt if call.forced is None else _force_call(prompt, renderer, call.forced)


async def _make_templated(
    graph: TokenGraph, renderer: Renderer, roots: RootCache, bound: ContextBound, call: ModelCall, chains: Sequence[str]
) -> Prompt:
    messages, match = call.messages, graph.match(call.messages, chains, call.policy)
    reason = match.reason
    if match.step is not None:
        reply, new = graph.steps[match.step], messages[match.known :]
        last_id = reply.completion_ids[-1] if reply.completion_ids else None
        system, thought = messages[0]["role"] == "system", graph.has_reasoning(match.step)
        extend = partial(
            renderer.extend, reply.message, new, last_id=last_id, tools=bool(call.tools), system=system, thought=thought
        )
        rendered = await _render(_texts(new), bound, extend)
        if rendered is not None:
            if (placed := place(rendered, new, call.pictures)) is None:
                return await _make_templated(graph, renderer, roots, bound, without_pictures(call), chains)
            before, (added, pictures) = graph.context(match.step), placed
            pictures = (*graph.pictures(match.step), *(picture.moved(len(before)) for picture in pictures))
            return Prompt(
                ids=before.then(added),
                parent=match.step,
                added=added,
                messages=new,
                tools=(),
                chain=match.chain,
                reason=reason,
                pictures=pictures,
            )
        reason = reason or TEMPLATE_REWRITES
    root = await roots.render(call, f"{match.chain} {len(pictures_of(messages))}", first=not graph.steps)
    if (placed := place(root, messages, call.pictures)) is None:
        return await _make_templated(graph, renderer, roots, bound, without_pictures(call), chains)
    (root, pictures), tools, chain = placed, call.tools, match.chain
    return Prompt(
        ids=TokenPath(root), parent=None, added=root, messages=messages, tools=tools, chain=chain, reason=reason, pictures=pictures
    )


async def _make_raw(graph: TokenGraph, renderer: Renderer, bound: ContextBound, raw: str | tuple[int, ...], policy: str) -> Prompt:
    """A prompt without a chat template, after the longest known path that it continues."""
    parent, known = graph.match_raw(raw, policy)
    if isinstance(raw, str):
        rest = raw[known:]
        added = await _render([rest], bound, lambda: renderer.encode_raw(rest))
        chain = blake2b(raw.encode(), digest_size=16).hexdigest()
    else:
        bound.check_ids(raw)
        added = raw[known:]
        rest, chain = renderer.tokenizer.decode(added), blake2b(pack_ints(raw), digest_size=16).hexdigest()
    before = TokenPath() if parent is None else graph.context(parent)
    messages: tuple[Message, ...] = ({"role": "user", "content": rest},)
    return Prompt(ids=before.then(added), parent=parent, added=added, messages=messages, tools=(), chain=RAW_CHAIN + chain)


def _force_call(prompt: Prompt, renderer: Renderer, name: str) -> Prompt:
    """Append the beginning of the required tool call to the prompt, so that the model must continue it."""
    forced_prefix = renderer.begin(name, prompt=prompt.ids)
    if forced_prefix is None:
        message = "this model's form of tool calls cannot be forced; use tool_choice 'auto' or 'none'"
        raise RequestError(message, code="unsupported_parameter", param="tool_choice")
    ids, text = forced_prefix
    return replace(prompt, ids=prompt.ids.then(ids), added=prompt.added + ids, forced_prefix=text)


async def _render(texts: Sequence[str], bound: ContextBound, render: Callable[[], Any]) -> Any:
    """Run `render` here, or in a thread if there is much to tokenize. `texts` are most of what it tokenizes."""
    if sum(map(len, texts)) <= LONG_TEXT:
        return render()

    def checked() -> Any:
        bound.check(texts)
        return render()

    return await asyncio.to_thread(checked)


def _texts(messages: Sequence[Message]) -> list[str]:
    """What a template writes of messages: contents, reasoning, and the arguments of calls."""
    texts: list[str] = []
    for message in messages:
        texts += [flatten(message.get("content")), message.get("reasoning_content") or ""]
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            texts += [name, arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()]
    return [text for text in texts if text]


# Pictures

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
