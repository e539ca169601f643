"""The interface of engines: token ids in; sampled ids, log-probabilities and policy versions out, streamed."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.records import Finish, Sampling


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
