"""How a model family writes tool calls: the seam, and what comes out of a parsed reply. One family is one file."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.records import Message
from penstock.render.chat import Tool


class Text(NamedTuple):
    """Text for the agent."""

    text: str


class ToolCall(NamedTuple):
    """A call that was written out whole and well-formed."""

    name: str
    arguments: str
    """JSON text of an object."""


Piece = Text | ToolCall


class ToolParser(Protocol):
    """Sampled text to pieces, as it comes. However the text is cut into pushes, the pieces say the same."""

    def push(self, text: str) -> list[Piece]:
        """What is certain now; markup that may yet become a call is kept back."""
        ...

    def finish(self) -> list[Piece]:
        """What was kept back: a call that was never finished is text."""
        ...


class ToolFormat(Protocol):
    """One way to offer tools to a model and to read its calls."""

    def matches(self, template: str) -> bool:
        """Whether a chat template that renders tools itself asks for calls in this form."""
        ...

    def offer(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The conversation with the tools described in its system text, for templates that know no tools."""
        ...

    def flatten(self, messages: Sequence[Message]) -> list[Message]:
        """Calls and results as plain text turns, for templates that know no tools."""
        ...

    def parser(self) -> ToolParser:
        """A fresh parser for one reply."""
        ...
