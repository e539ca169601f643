"""Progress of work that is no training run: stages, each with how far it is."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.models import Progress


@contextmanager
def stage_progress() -> "Generator[Progress]":
    """Shows a longer piece of work on stderr: a bar on a terminal, elsewhere one line for each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True, highlight=False)
    if not console.is_interactive or console.is_dumb_terminal:
        yield _StageLines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        yield _StageBars(bars)


class _StageLines:
    def __init__(self, console: Any) -> None:
        self._console, self._stage = console, ""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        if stage != self._stage:
            self._stage = stage
            self._console.print(stage, markup=False, soft_wrap=True)


class _StageBars:
    """One bar, begun again at each stage; without a total it only shows that something moves."""

    def __init__(self, bars: Any) -> None:
        self._bars, self._stage, self._bar = bars, "", None

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        if stage != self._stage:
            if self._bar is not None:
                self._bars.remove_task(self._bar)
            self._stage, self._bar = stage, self._bars.add_task(stage, total=total)
        self._bars.update(self._bar, completed=done, total=total)
