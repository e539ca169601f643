"""What every engine offers: token ids in; ids, log-probabilities and policy versions out, as they are sampled."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.records import Finish, Sampling


@dataclass(frozen=True, slots=True)
class SampledChunk:
    """Tokens sampled since the last chunk of the same request; the last chunk says how it finished."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the distribution actually sampled from: after temperature, top-k, top-p and min-p."""
    full_logprobs: tuple[float, ...]
    """Under the plain softmax of the logits; empty where they differ from `logprobs` and the engine cannot tell."""
    versions: tuple[int, ...]
    finish: Finish | None = None


class Engine(Protocol):
    """A policy that can be sampled from and replaced while it is."""

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

        Raises EngineBusy where the queue is full and EngineError where the request cannot be served, both before the first chunk.
        """
        ...

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        """Between two steps, run `change` (which rewrites the weights in place) and serve `version` from then on.

        Running requests go on; whatever the engine had computed from the old weights is computed again.
        """
        ...

    async def load(self, version: int, folder: Path) -> None:
        """Serve the weights of a model folder as `version`, from the next token on; running requests go on.

        It must be of the same shape. EngineError where the weights cannot be taken; the version before is then served on.
        """
        ...

    async def close(self) -> None:
        """Fail what is running and free everything."""
        ...
