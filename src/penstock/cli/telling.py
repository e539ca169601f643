"""How commands about a controller's things speak: text for people, one JSON object, or rows for other programs."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from penstock.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plain = Annotated[bool, typer.Option("--plain", help="Print tab-separated rows without a header.")]
Limit = Annotated[int, typer.Option(min=1, max=50, help="The most rows to print.")]
All = Annotated[bool, typer.Option("--all", help="Print all rows.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """Of a list."""

    title: str
    cell: Callable[[Row], object]


def show(found: Row, text: str, *, as_json: bool) -> None:
    """One result."""
    typer.echo(orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS).decode() if as_json else text)


def show_rows(page: Row, key: str, columns: Sequence[Column], *, as_json: bool, plain: bool, empty: str) -> None:
    """A list: the page itself as JSON, else its rows; `empty` says what to do where there is none."""
    if as_json and plain:
        raise ConfigError("--json and --plain go without each other")
    if as_json:
        show(page, "", as_json=True)
        return
    cells = [[_text(column.cell(row)) for column in columns] for row in page[key]]
    if plain:
        for row in cells:
            typer.echo("\t".join(" ".join(cell.split()) for cell in row))
    elif not cells:
        typer.echo(empty, err=True)
    else:
        _table([column.title for column in columns], cells)
        if page.get("has_more"):
            typer.echo(f"{len(cells)} of {page['total_count']}; --all prints all", err=True)


def labelled(pairs: Iterable[tuple[str, object]]) -> str:
    """A line for each label that has a value."""
    known = [(label, _text(value)) for label, value in pairs if value not in (None, "", {}, [])]
    width = max((len(label) for label, _ in known), default=0)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in known)


def confirmed(question: str, *, yes: bool) -> None:
    """Ask a person at a terminal; a program is not asked. Exit code 1 for a no."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not typer.confirm(question, default=True, err=True):
        typer.echo("penstock: nothing was done", err=True)
        raise typer.Exit(1)


def when(text: object) -> str:
    """A controller's time in the reader's zone, to the second."""
    try:
        return datetime.fromisoformat(str(text)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return ""


def lasted(start: object, end: object) -> str:
    """From one of a controller's times to another, or to now."""
    try:
        begun = datetime.fromisoformat(str(start))
        over = datetime.fromisoformat(str(end)) if end else datetime.now(UTC)
    except ValueError:
        return ""
    seconds = round(max(0.0, (over - begun).total_seconds()))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


def size(count: object) -> str:
    """Of a file, in the unit that reads best."""
    number = float(count) if isinstance(count, int | float) else 0.0
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def save(path: Path, content: bytes) -> None:
    """Write a file that a person asked for, whole or not at all; ConfigError where it cannot be written."""
    draft = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as cause:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"{path}: cannot be written: {cause.strerror}; give another place with -o") from cause


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(title), *(len(row[index]) for row in rows)) for index, title in enumerate(titles)]
    for row in ([title.upper() for title in titles], *rows):
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
