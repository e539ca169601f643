"""Where a reader of several channels stands: one place in each, so that none is passed over when another grows."""

from collections.abc import Iterable
from typing import NamedTuple

from starlette.requests import Request

from penstock.gateway.flow_bodies import wrong

MOST = 200
"""Of entries in one answer; also how many there are where the reader does not say."""
FURTHEST = 1000
"""How many entries may be passed over by `offset`; further on, a cursor leads without reading what lies before."""


class Place(NamedTuple):
    """In a channel: the number of a group, and how many of that number's entries were told."""

    seq: int = 0
    told: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.told}"


def read_limit(request: Request) -> int:
    """How many entries are wanted."""
    return min(_number(request, "limit", MOST, low=1), MOST)


def read_offset(request: Request) -> int:
    """How many entries are to be passed over."""
    offset = _number(request, "offset", 0, low=0)
    if offset > FURTHEST:
        raise wrong(f"pass over at most {FURTHEST} entries; go on from the cursors of the last answer", "query", "offset")
    return offset


def read_channels(request: Request, known: Iterable[str]) -> list[str]:
    """The channels that are asked for, by `channel` or `channels`, commas between them; all that are known where none is."""
    given = request.query_params.get("channels") or request.query_params.get("channel") or ""
    named = [name for part in given.split(",") if (name := part.strip())]
    return list(dict.fromkeys(named)) or list(known)


def read_positions(request: Request, channels: Iterable[str]) -> dict[str, int]:
    """Of events: where each channel is read from. `cursor` is one number for all, or `train:12,val:9`."""
    given = request.query_params.get("cursor", "")
    if given.isdecimal():
        return dict.fromkeys(channels, int(given))
    parts = _parts(given)
    return {channel: _whole(parts.get(channel, "0")) for channel in channels}


def read_places(request: Request, channels: Iterable[str]) -> dict[str, Place]:
    """Of entries: where each channel is read from. `cursor` is what an answer's cursors said: `train:12.3,val:0.0`."""
    parts = _parts(request.query_params.get("cursor", ""))
    places: dict[str, Place] = {}
    for channel in channels:
        seq, _, told = parts.get(channel, "0.0").partition(".")
        places[channel] = Place(_whole(seq), _whole(told or "0"))
    return places


def _parts(given: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in filter(None, given.split(",")):
        channel, colon, place = part.rpartition(":")
        if not colon or not channel:
            raise wrong("must be like `train:12,val:9`, as the last answer's cursors say", "query", "cursor")
        parts[channel.strip()] = place
    return parts


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise wrong("must hold whole numbers, as the last answer's cursors do", "query", "cursor")
    return int(text)


def _number(request: Request, name: str, default: int, *, low: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 18 or int(text) < low:
        raise wrong(f"must be a whole number, {low} or more", "query", name)
    return int(text)
