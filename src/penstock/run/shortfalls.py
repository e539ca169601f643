"""What fell short in a run: why rollouts did not pass, and what gateways did not do as agents asked.

Rollouts fall short in three numbers, each with its most common reason: failed, ungraded, wrong. A broken agent must not look like a
bad model: only what is graded and below the mark is wrong.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, cast

import orjson

from penstock.records import End

KINDS = ("failed", "ungraded", "wrong")
"""Failed before it could be graded; not graded because the grader failed; graded, with a reward below the mark."""
REASON_CHARS = 200


class ScoredEnd(NamedTuple):
    """How a rollout ended."""

    end: str
    message: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Shortfall:
    count: int
    reason: str
    """The most common one; empty if the count is 0."""

    @property
    def text(self) -> str:
        return f"{self.count:,} ({self.reason})" if self.reason else f"{self.count:,}"


def shortfalls(ends: Iterable[ScoredEnd], passes: float) -> dict[str, Shortfall]:
    """Returns the shortfall of each of `KINDS`; `passes` is the reward from which a rollout is not wrong."""
    reasons = {kind: Counter[str]() for kind in KINDS}
    for each in ends:
        message = shorten(each.message, REASON_CHARS, placeholder="…") or "no message"
        if each.end == End.GRADER_ERROR or (each.end == End.COMPLETED and each.reward is None):
            reasons["ungraded"][message] += 1
        elif each.end != End.COMPLETED:
            reasons["failed"][f"{each.end}: {message}"] += 1
        elif each.reward is not None and each.reward < passes:
            reasons["wrong"][f"reward {each.reward:g}, below {passes:g}"] += 1
    return {kind: _shortfall(found) for kind, found in reasons.items()}


def shortfalls_json(found: Mapping[str, Shortfall]) -> dict[str, dict[str, Any]]:
    return {kind: asdict(each) for kind, each in found.items()}


def read_shortfalls(found: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Shortfall]:
    """Reads what `shortfalls_json` wrote; empty for records of an earlier penstock."""
    return {kind: Shortfall(each["count"], each["reason"]) for kind, each in (found or {}).items()}


def shortfall_rows(found: Mapping[str, Shortfall]) -> list[tuple[str, str]]:
    """Returns label and text of each, for tables."""
    return [(kind, each.text) for kind, each in found.items()]


def add_shortfalls(several: Iterable[Mapping[str, Shortfall]]) -> dict[str, Shortfall]:
    """Adds them up; the reason is that of the largest part."""
    total: dict[str, Shortfall] = {}
    largest: dict[str, int] = {}
    for found in several:
        for kind, each in found.items():
            before = total.get(kind, Shortfall(0, ""))
            leads = each.count > largest.get(kind, 0)
            largest[kind] = max(each.count, largest.get(kind, 0))
            total[kind] = Shortfall(before.count + each.count, each.reason if leads else before.reason)
    return total


def _shortfall(found: Counter[str]) -> Shortfall:
    reason, often = found.most_common(1)[0] if found else ("", 0)
    return Shortfall(found.total(), reason if often == found.total() or not reason else f"{often} of them {reason}")


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
