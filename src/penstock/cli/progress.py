"""Which rollouts run now, how fast they end, and what is being waited for; kept from events."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.cli.output import clock


@dataclass(slots=True)
class RunningRollouts:
    """Rollouts between their start and their end. Only `apply` changes it."""

    now: Callable[[], float] = time.monotonic
    started: dict[str, float] = field(default_factory=dict[str, float])
    """When each that runs began."""
    grading: set[str] = field(default_factory=set[str])
    """Those whose agent is done."""
    ended: int = 0
    first_at: float | None = None

    def apply(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "rollout.start":
                self.started[fields["rollout_id"]] = self.now()
                self.first_at = self.now() if self.first_at is None else self.first_at
            case "rollout.grade":
                self.grading.add(fields["rollout_id"])
            case "rollout.end":
                name = fields.get("rollout_id", "")
                self.started.pop(name, None)
                self.grading.discard(name)
                self.ended += fields["end"] != "lost"
            case _:
                pass

    @property
    def per_second(self) -> float | None:
        """How many have ended in a second so far; None before the first."""
        if self.first_at is None or not self.ended:
            return None
        return self.ended / max(1e-3, self.now() - self.first_at)

    def left_s(self, total: int) -> float | None:
        """The time until `total` have ended, at the pace so far; None if that is not known, or they have."""
        pace = self.per_second
        return None if pace is None or total <= self.ended else (total - self.ended) / pace

    def waiting_text(self) -> str:
        """What is being waited for; empty if nothing runs."""
        started, grading = self.started.copy(), self.grading.copy()  # another thread may add to them
        if not started:
            return ""
        longest = clock(self.now() - min(started.values()))
        graded = f", {len(grading)} being graded" if grading else ""
        return f"{len(started)} running{graded}, the longest for {longest}"


def pace_text(per_second: float | None) -> str:
    """`3.2/s`, `12/min` or `40/h`; empty for None."""
    if per_second is None:
        return ""
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
        if per_second * seconds >= 1 or unit == "h":
            return f"{per_second * seconds:.2g}/{unit}" if per_second * seconds < 10 else f"{per_second * seconds:,.0f}/{unit}"
    return ""
