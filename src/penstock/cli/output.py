"""What commands print: numbers as short text, tables, results as text or JSON, questions, notices and progress."""

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.errors import ConfigError
from penstock.system.files import write_file

if TYPE_CHECKING:
    from penstock.models import PullProgress


# Options


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plain = Annotated[bool, typer.Option("--plain", help="Print tab-separated rows without a header.")]
PLAIN = "Print progress as lines, and the result as lines with tabs: name, value, lower and upper bound."
Limit = Annotated[int, typer.Option(min=1, max=50, help="The most rows to print.")]
All = Annotated[bool, typer.Option("--all", help="Print all rows.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def check_format(*, as_json: bool, plain: bool) -> None:
    if as_json and plain:
        raise ConfigError("--json and --plain go without each other")


# Results, tables and questions


Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableColumn:
    title: str
    cell: Callable[[Row], object]


def print_result(found: Row, text: str, *, as_json: bool) -> None:
    typer.echo(orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS).decode() if as_json else text)


def print_table(page: Row, key: str, columns: Sequence[TableColumn], *, as_json: bool, plain: bool, empty: str) -> None:
    """Print a list: the page itself as JSON, else its rows. `empty` is printed if there is none."""
    check_format(as_json=as_json, plain=plain)
    if as_json:
        print_result(page, "", as_json=True)
        return
    cells = [[_text(column.cell(row)) for column in columns] for row in page[key]]
    if plain:
        for row in cells:
            typer.echo("\t".join(" ".join(cell.split()) for cell in row))
    elif not cells:
        typer.echo(empty, err=True)
    else:
        typer.echo("\n".join(table_lines([[column.title.upper() for column in columns], *cells])))
        if page.get("has_more"):
            typer.echo(f"{len(cells)} of {page['total_count']}; --all prints all", err=True)


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def labelled_lines(pairs: Iterable[tuple[str, object]]) -> str:
    """A line for each label that has a value."""
    known = [(label, _text(value)) for label, value in pairs if value not in (None, "", {}, [])]
    width = max((len(label) for label, _ in known), default=0)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in known)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def warn(text: str) -> None:
    """Print a notice to stderr."""
    typer.echo(f"penstock: {text}", err=True)


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user at a terminal; without a terminal nothing is asked. Exits with code 1 for a no."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, default=True, err=True):
        warn("nothing was done")
        raise typer.Exit(1)


def save_file(path: Path, content: bytes) -> None:
    """Write a file that the user named with -o; ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be written: {cause.strerror}; give another place with -o") from cause


# Times and sizes as text


def local_time(text: object) -> str:
    """A timestamp of the controller in the local time zone, to the second."""
    try:
        return datetime.fromisoformat(str(text)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""


def elapsed(start: object, end: object) -> str:
    """The time from one timestamp of the controller to another, or to now."""
    try:
        begun = datetime.fromisoformat(str(start))
        over = datetime.fromisoformat(str(end)) if end else datetime.now(UTC)
    except ValueError:
        return ""
    seconds = round(max(0.0, (over - begun).total_seconds()))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


def file_size(count: object) -> str:
    """A number of bytes in the unit that reads best."""
    number = float(count) if isinstance(count, int | float) else 0.0
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


# Progress


@contextmanager
def stage_progress() -> "Generator[PullProgress]":
    """Show long work on stderr: a bar on a terminal, elsewhere one line for each stage."""
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
    """One bar, restarted at each stage; without a total it only shows that something moves."""

    def __init__(self, bars: Any) -> None:
        self._bars, self._stage, self._bar = bars, "", None

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        if stage != self._stage:
            if self._bar is not None:
                self._bars.remove_task(self._bar)
            self._stage, self._bar = stage, self._bars.add_task(stage, total=total)
        self._bars.update(self._bar, completed=done, total=total)
