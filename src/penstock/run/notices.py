"""What the gateways of a run did not do as agents asked, by name: capped lengths, replies that were cut, ignored fields."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson


class NoticeCounts:
    """Adds up the events of all gateways of a run.

    A gateway emits `gateway.notice` at the first of each name, and all its counts when it stops. Of one that was killed only the
    names are known, each of which counts once.
    """

    KINDS = ("gateway.notice", "gateway.stop")

    def __init__(self) -> None:
        self._counted, self._named = Counter[str](), Counter[str]()

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event of one of `KINDS`; others, and damaged ones, are left out."""
        if event.get("kind") == "gateway.notice":
            self._named[str(event.get("name", ""))] += 1
        elif event.get("kind") == "gateway.stop" and isinstance(counts := event.get("counts"), dict):
            known = cast("dict[str, Any]", counts).items()
            self._counted.update({name: count for name, count in known if isinstance(count, int)})

    def clear(self) -> None:
        self._counted.clear()
        self._named.clear()

    def total(self) -> dict[str, int]:
        """Returns the counts, the largest first."""
        return dict((self._counted | self._named).most_common())


def read_notices(events: Path) -> dict[str, int]:
    """Returns the counts of a run from its event log; empty if there is none."""
    found, wanted = NoticeCounts(), [f'"{kind}"'.encode() for kind in NoticeCounts.KINDS]
    if not events.exists():
        return {}
    with events.open("rb") as lines:
        for line in lines:
            if any(kind in line for kind in wanted):
                found.add(_event(line))
    return found.total()


def _event(line: bytes) -> dict[str, Any]:
    try:
        event: Any = orjson.loads(line)
    except ValueError:  # a kill cut the line short
        return {}
    return cast("dict[str, Any]", event) if isinstance(event, dict) else {}
