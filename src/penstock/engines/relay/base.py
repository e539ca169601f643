"""What every relay offers: messages and tools in; text, calls and the counts of tokens out, as they come."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engines.base import Sampled
from penstock.errors import EngineError
from penstock.records import Finish, Message, Sampling, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request for one reply."""

    messages: Sequence[Message]
    """In the OpenAI form, system messages among them."""
    sampling: Sampling
    tools: Sequence[dict[str, Any]] = ()
    """In the OpenAI form."""
    may_call: bool = True
    """Whether the reply may call one of the tools."""
    forced: str | None = None
    """The tool that it must call, empty for any of them; None where the model is free."""


class Said(NamedTuple):
    """More text."""

    text: str


class Thought(NamedTuple):
    """More reasoning, where the endpoint shows it."""

    text: str


class Called(NamedTuple):
    """A call begins."""

    id: str
    """The endpoint's own; empty where it gives none."""
    name: str


class Argued(NamedTuple):
    """More of the arguments of the call that began last, JSON text."""

    text: str


Part = Said | Thought | Called | Argued


class Heard(NamedTuple):
    """What came since the last chunk of the same reply; the last one says how it finished, and what it cost."""

    parts: tuple[Part, ...]
    finish: Finish | None = None
    usage: Usage | None = None


class Relay(ABC):
    """An engine that knows no tokens: what asks for tokens, or brings weights, is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def model(self) -> str:
        """The endpoint's name for the model."""
        return self._name

    @property
    def context_length(self) -> int:
        """Not known here: the endpoint says when a conversation is too long."""
        return 0

    @property
    def version(self) -> int:
        """There is one."""
        return 0

    @abstractmethod
    def ask(self, asked: Asked, *, rollout_id: str = "") -> AsyncGenerator[Heard, None]:
        """Ask for one reply. Closing the generator hangs up.

        Raises EngineBusy where the endpoint has no room, EngineError where it fails, and RequestError where it would refuse the
        same request again; after the first chunk EngineError only.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of all connections."""

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = "") -> AsyncGenerator[Sampled, None]:
        """Refused."""
        raise EngineError(f"{self._name} is behind an endpoint that takes messages, not tokens; `ask` it")

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        """Refused."""
        raise EngineError(f"policy version {version}: {self._name} is behind an endpoint, whose weights are not ours to change")

    async def load(self, version: int, folder: Path) -> None:
        """Refused."""
        raise EngineError(f"policy version {version}: {self._name} is behind an endpoint, whose weights are not ours to change")
