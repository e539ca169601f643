"""The interface of engines, and opening one: token ids in; sampled ids, log-probabilities and policy versions out, streamed."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Protocol, TypeGuard, overload

from penstock.config import EngineSection
from penstock.engines import ENGINES
from penstock.engines.checkpoint_files import refuse_damaged_weights
from penstock.records import Finish, PlacedPicture, Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledChunk:
    """Tokens sampled since the last chunk of the same request; the last chunk has the finish reason."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the distribution actually sampled from: after temperature, top-k, top-p and min-p."""
    full_logprobs: tuple[float, ...]
    """Under the plain softmax of the logits; empty if they differ from `logprobs` and the engine does not know them."""
    versions: tuple[int, ...]
    finish: Finish | None = None
    behaviour_known: bool = True
    """False: `logprobs` are under the plain softmax too, which is all that the engine reports of a tempered or truncated token."""
    kept: tuple[bytes, ...] = ()
    """See `Step.kept`."""
    most_likely: tuple[TokenLogprobs, ...] = ()
    """See `Step.most_likely`."""


class Engine(Protocol):
    """A policy that can be sampled from, and replaced while requests run."""

    @property
    def model(self) -> str:
        """The name that `/v1/models` shows."""
        ...

    @property
    def context_length(self) -> int:
        """Prompt and reply together must fit in this many tokens."""
        ...

    @property
    def version(self) -> int:
        """The policy version that the next token will be sampled under."""
        ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        """Sample one reply. Closing the generator cancels the request: its slot is free at the next step.

        Raises EngineBusy if the queue is full and EngineError if the request cannot be served, both before the first chunk.
        """
        ...

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        """Between two steps, run `change` (which rewrites the weights in place) and serve `version` from then on.

        Running requests continue; everything computed from the old weights is computed again.
        """
        ...

    async def load(self, version: int, folder: Path) -> None:
        """Serve the weights of a model folder as `version` from the next token on; running requests continue.

        The model must have the same shape. EngineError if the weights cannot be loaded; the old version then stays.
        """
        ...

    async def close(self) -> None:
        """Fail what is running and free everything."""
        ...


class AdapterEngine(Engine, Protocol):
    """An engine that serves the adapters of several policies on one base model."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = "", policy: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        """See `Engine.generate`. A policy without an adapter is the base model."""
        ...

    def version_of(self, policy: str) -> int:
        """The version that the next token of a policy will be sampled under."""
        ...

    async def load(self, version: int, folder: Path, *, policy: str = "") -> None:
        """See `Engine.load`. Of an adapter's folder, the policy alone gets the new version."""
        ...


class RenderedPicture(NamedTuple):
    """How a server renders a user's message with nothing but a picture."""

    ids: tuple[int, ...]
    """The whole prompt, with the head of the reply."""
    first: int
    """Where the tokens that stand for the picture begin."""
    size: int


class SentPicture(NamedTuple):
    """A picture of a prompt, for the engine."""

    place: PlacedPicture
    """In the whole prompt."""
    url: str
    """Its bytes, as a `data:` URL."""


class PictureEngine(Engine, Protocol):
    """An engine whose model may see pictures."""

    async def render_picture(self, url: str) -> RenderedPicture:
        """EngineRefused if the model sees none, or not this one."""
        ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = "", pictures: Sequence[SentPicture] = ()
    ) -> AsyncGenerator[SampledChunk, None]:
        """See `Engine.generate`. `pictures` are in the order of their places."""
        ...


def sees_pictures(engine: Engine) -> TypeGuard[PictureEngine]:
    return hasattr(engine, "render_picture")


def has_adapters(engine: Engine) -> TypeGuard[AdapterEngine]:
    return hasattr(engine, "version_of")


class TokenPath(Sequence[int]):
    """A prompt as a sequence of parts, which are shared and never copied. It equals the tuple of all its tokens.

    Appending a part takes time proportional to the number of parts, not of tokens: a conversation grows by a few tokens with each
    call, and its history may hold many thousands.

    >>> prompt = TokenPath((1, 2), (3,))
    >>> prompt.then((4, 5)) == (1, 2, 3, 4, 5), prompt[-2:], len(prompt)
    (True, (2, 3), 3)
    """

    __slots__ = ("_ends", "_parts")

    def __init__(self, *parts: tuple[int, ...]) -> None:
        self._parts = parts
        ends, end = [0], 0
        for part in parts:
            ends.append(end := end + len(part))
        self._ends = tuple(ends)
        """0, then the end of each part."""

    def then(self, added: tuple[int, ...]) -> "TokenPath":
        longer = TokenPath()
        longer._parts, longer._ends = (*self._parts, added), (*self._ends, self._ends[-1] + len(added))
        return longer

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice) and index.step not in (None, 1):
            return tuple(self)[index]
        position = range(len(self))[index]
        first = position if isinstance(position, int) else position.start
        which = bisect_right(self._ends, first) - 1
        before = self._ends[which]
        if isinstance(position, int):
            return self._parts[which][position - before]
        return tuple(islice(chain.from_iterable(self._parts[which:]), first - before, max(first, position.stop) - before))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenPath | tuple | list):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TokenPath({tuple(self)})"


async def open_engine(
    section: EngineSection, model: Path, *, name: str, seed: int, decode: Callable[[Sequence[int]], str] | None
) -> Engine:
    """Opens the engine for the model in folder `model`, which a text endpoint does not read. Close it after use.

    `decode` turns token ids into text, for engines that constrain replies; None for text endpoints.
    """
    if not section.text_only:
        await asyncio.to_thread(refuse_damaged_weights, model)
    opener = ENGINES.load(section.name)
    return await asyncio.to_thread(opener, model, name=name, section=section, seed=seed, decode=decode)
