"""Prints results and errors as JSON, plain lines or text, and asks for confirmation."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TextIO, cast

import orjson
import typer

from osmosis_ai import __version__
from penstock.errors import PenstockError

# Values as text

NONE = "—"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows: each column is as wide as its widest cell."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plain(value: Any) -> str:
    """Formats any value on one line."""
    return NONE if value is None else re.sub(r"\s+", " ", str(value))


def moment(text: str | None) -> str:
    """Formats as `Jan 2, 2026 3:04 PM` in the local time zone. Text without a time zone is returned unchanged."""
    try:
        read = datetime.fromisoformat(text or "")
    except ValueError:
        return text or NONE
    if read.tzinfo is None:
        return text or NONE
    local = read.astimezone()
    return f"{local:%b} {local.day}, {local.year} {local.hour % 12 or 12}:{local:%M %p}"


def size(count: int | None) -> str:
    if count is None:
        return NONE
    amount, unit = float(count), "B"
    for larger in ("KB", "MB", "GB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def duration(milliseconds: float | None) -> str | None:
    if milliseconds is None:
        return None
    seconds = round(milliseconds / 1000)
    parts = [(seconds // 3600, "h"), (seconds % 3600 // 60, "m"), (seconds % 60, "s")]
    return " ".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


def settings(config: dict[str, Any] | None) -> str | None:
    """Formats as `key=value, table.key=value`, without the model, which is shown separately."""
    texts: list[str] = []
    for key, value in sorted((config or {}).items()):
        table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        pairs = [(f"{key}.{inner}", item) for inner, item in sorted(table.items())] or [(key, value)]
        texts += [f"{name}={item}" for name, item in pairs if item is not None and name != "model_path"]
    return ", ".join(texts) or None


def two_digits(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def percent(value: float | None) -> str | None:
    """Formats a rate between 0 and 1."""
    return None if value is None else f"{value:.1%}"


# Results

Mode = Literal["human", "json", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    items: Sequence[Mapping[str, Any]]
    shown: Sequence[Sequence[str]]
    """The rows' cells as text, in the order of `titles`."""
    titles: Sequence[str]
    total_count: int
    has_more: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More fields of the envelope. They override fields of the same name."""
    next_offset: int | None = None
    hint: str = ""

    def as_json(self) -> dict[str, Any]:
        """The envelope without its version."""
        page = {"items": self.items, "total_count": self.total_count, "has_more": self.has_more, "next_offset": self.next_offset}
        return page | dict(self.extra)

    def lines(self, mode: Mode) -> list[str]:
        """Returns tab-separated rows in plain mode, or else aligned columns with a heading."""
        if mode == "plain":
            return ["\t".join(plain(cell) for cell in row) for row in self.shown]
        more = [f"{len(self.items)} of {self.total_count}; --all shows all of them"] if self.next_offset is not None else []
        hint = [self.hint] if self.hint else []
        return [*(columns([self.titles, *self.shown]) if self.shown else ["Nothing there yet."]), *more, *hint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One object with all its fields."""

    data: Mapping[str, Any]
    fields: Mapping[str, Any]
    """Values by label. None and empty text are not shown."""
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Lines below the fields, by heading."""
    exit_code: int = 0

    def as_json(self) -> dict[str, Any]:
        """The envelope without its version."""
        return {"data": self.data}

    def lines(self, mode: Mode) -> list[str]:
        """Returns lines of `Label: value`, aligned in human mode."""
        values = [(label, plain(value)) for label, value in self.fields.items() if value not in (None, "")]
        width = max((len(label) for label, _ in values), default=0) + 2 if mode == "human" else 0
        lines = [f"{label + ':':<{width}} {value}" for label, value in values]
        for heading, below in self.sections.items():
            lines += ["", f"{heading}", *below] if mode == "human" else below
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The outcome of an action."""

    operation: str
    """The action's name, such as `eval.submit`."""
    message: str
    status: str = "success"
    resource: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps: Sequence[Mapping[str, Any]] = ()
    """Next steps for scripts."""
    hints: Sequence[str] = ()
    """Lines for people, below the message."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exit_code: int = 0

    def as_json(self) -> dict[str, Any]:
        """The envelope without its version."""
        values = {"status": self.status, "operation": self.operation, "resource": self.resource, "message": self.message}
        return values | ({"next_steps_structured": self.steps} if self.steps else {}) | dict(self.extra)

    def lines(self, mode: Mode) -> list[str]:
        """Returns the message and the hints."""
        return [plain(self.message) if mode == "plain" else self.message, *self.hints]


Result = Listing | Detail | Operation


# Terminal

SCHEMA = {"schema_version": 1}


class CliError(PenstockError):
    """Ends a command. `code` is for scripts."""

    def __init__(self, message: str, code: str = "VALIDATION", **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class Terminal:
    """The output of a command; `typer.Context.obj` of every command."""

    mode: Mode

    def show(self, result: Result) -> int:
        """Prints the result on stdout. Returns the exit code."""
        if self.mode == "json":
            self._write(sys.stdout, result.as_json())
        else:
            typer.echo("\n".join(result.lines(self.mode))) if result.lines(self.mode) else None
        return 0 if isinstance(result, Listing) else result.exit_code

    def fail(self, message: str, code: str, command: str, details: Mapping[str, Any] | None = None) -> None:
        """Prints an error on stderr."""
        if self.mode == "json":
            error = {"code": code, "message": message, "details": dict(details or {}), "request_id": None}
            self._write(sys.stderr, {"command": command, "cli_version": __version__, "error": error})
        else:
            typer.echo(f"Error: {message}", err=True)

    def warn(self, message: str, code: str | None = None) -> None:
        """Prints a warning on stderr."""
        if self.mode == "json":
            self._write(sys.stderr, {"cli_version": __version__, "warning": {"code": code, "message": message}})
        else:
            typer.echo(f"Warning: {message}", err=True)

    def confirm(self, prompt: str, *, yes: bool, summary: Mapping[str, Any], warnings: Sequence[str] = ()) -> None:
        """Returns if the user agrees or `yes` is set, and exits otherwise. Raises INTERACTIVE_REQUIRED if nobody can be asked."""
        if yes:
            return
        listed = [{"label": label, "value": value} for label, value in summary.items()]
        if not self.can_ask:
            text = f"{prompt} Nobody can be asked here; pass --yes"
            raise CliError(text, "INTERACTIVE_REQUIRED", prompt=prompt, summary=listed, notes=[], warnings=list(warnings))
        typer.echo("\n".join(columns([[f"{label}:", plain(value)] for label, value in summary.items()])), err=True)
        if not typer.confirm(prompt, err=True):
            typer.echo("Nothing was done.", err=True)
            raise typer.Exit(1)

    @property
    def can_ask(self) -> bool:
        """Whether a person can answer a prompt."""
        return self.mode == "human" and sys.stdin.isatty()

    @staticmethod
    def _write(stream: TextIO, body: Mapping[str, Any]) -> None:
        stream.write(orjson.dumps(SCHEMA | dict(body), default=str).decode() + "\n")
        stream.flush()


def terminal(context: typer.Context) -> Terminal:
    """Returns the terminal of the running command."""
    return context.obj
