"""How a model family writes reasoning and tool calls: the seam, and what comes out of a parsed reply. One family is one file."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.records import Message
from penstock.render.chat import Tool


class Text(NamedTuple):
    """Text for the agent."""

    text: str


class Reasoning(NamedTuple):
    """What the model thinks before it speaks: shown apart from the text."""

    text: str


class ToolCall(NamedTuple):
    """A call begins: its name, and as much of its arguments as is known."""

    name: str
    arguments: str
    """JSON text of an object, as the model wrote it, or the beginning of it."""


class Arguments(NamedTuple):
    """More of the arguments of the call that began last."""

    text: str


Piece = Text | Reasoning | ToolCall | Arguments


class Marks(NamedTuple):
    """What stands around the reasoning of a model, such as `<think>` and `</think>`."""

    opening: str
    closing: str


class Reading(NamedTuple):
    """How one reply is to be read."""

    calls: bool
    """Without, markup of calls is text."""
    eager: bool
    """Whether arguments are given out while they are written: a call that then turns out malformed stays a call. Otherwise a
    call comes whole, and one that is malformed is text."""
    marks: Marks | None = None
    """None where the model writes no reasoning, or has a form of its own for it."""
    thinking: bool = False
    """Whether the prompt's end has opened the reasoning."""
    tools: Sequence[Tool] = ()
    """What may be called: forms that write arguments without JSON need the schemas to tell a text from a number."""


class ReplyParser(Protocol):
    """Sampled text to pieces, as it comes. However the text is cut into pushes, the pieces add up to the same."""

    def push(self, text: str) -> list[Piece]:
        """What is certain now; markup that may yet become a call is kept back."""
        ...

    def finish(self) -> list[Piece]:
        """What was kept back: a call that was never finished is text."""
        ...


class ToolFormat(Protocol):
    """One way in which models that know tools write their reasoning and calls."""

    special: tuple[str, ...]
    """Special tokens that the markup is made of: the parser must see them as text."""
    ends: tuple[str, ...]
    """Special tokens that end a reply of this family; where there are none, what closes a turn in the template does."""

    def matches(self, template: str) -> bool:
        """Whether a chat template that renders tools itself asks for calls in this form."""
        ...

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as this family's own template takes them, such as ids of the length that it asks for."""
        ...

    def begin(self, name: str) -> str | None:
        """How a call of this tool (of any, where the name is empty) begins: what a forced call's prompt ends with. None: cannot."""
        ...

    def parser(self, reading: Reading) -> ReplyParser:
        """A fresh parser for one reply."""
        ...
