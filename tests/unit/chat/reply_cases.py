"""What a parsed reply adds up to, and ways to cut a text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.chat.parsers.base import Arguments, Piece, Reasoning, ReplyParser, Text, ToolCall


class Read(NamedTuple):
    """A whole reply."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]


def added_up(pieces: Sequence[Piece]) -> Read:
    """All pieces as one reply."""
    read = Read("", "", [])
    for piece in pieces:
        if isinstance(piece, Text):
            read = read._replace(text=read.text + piece.text)
        elif isinstance(piece, Reasoning):
            read = read._replace(reasoning=read.reasoning + piece.text)
        elif isinstance(piece, ToolCall):
            read.calls.append((piece.name, piece.arguments))
        else:
            name, arguments = read.calls[-1]
            read.calls[-1] = (name, arguments + piece.text)
    assert not any(piece in (Text(""), Reasoning(""), Arguments("")) for piece in pieces), "a piece says something"
    return read


def parse(parser: ReplyParser, *pushes: str) -> Read:
    """What a parser makes of a text."""
    return added_up([piece for text in pushes for piece in parser.push(text)] + parser.finish())


def cut_at(text: str, cuts: Sequence[int]) -> list[str]:
    """The text in parts; the cuts may be any numbers."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]
