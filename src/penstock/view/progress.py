"""Parts of the progress displays: the rollouts that are running, their pace, and a display that works in notebooks."""

import importlib
import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, RenderableType

from penstock.view.formatting import clock


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


# Notebooks


WIDTH = 100


def in_notebook() -> bool:
    """Returns whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "kernel", None) is not None if ipython else False


def make_console() -> Console:
    """Returns the console for progress: stderr, or a notebook's plain output."""
    if in_notebook():
        return Console(file=sys.stdout, force_jupyter=False, highlight=False, width=WIDTH)
    return Console(stderr=True, highlight=False)


class NotebookArea:
    """An output of a notebook cell that is drawn again in place. rich does that only where ipywidgets is installed."""

    def __init__(self, render: Callable[[], RenderableType]) -> None:
        self._render, self._shown = render, ""

    def __enter__(self) -> Self:
        display: Any = importlib.import_module("IPython.display").display
        self._handle = display(self._draw(), raw=True, display_id=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self.refresh()

    def refresh(self) -> None:
        before, drawn = self._shown, self._draw()
        if self._shown != before:
            self._handle.update(drawn, raw=True)

    def _draw(self) -> dict[str, str]:
        console = Console(file=io.StringIO(), record=True, force_jupyter=False, force_terminal=True, width=WIDTH)
        console.print(self._render())
        self._shown = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>", clear=False)
        return {"text/html": self._shown, "text/plain": console.export_text()}
