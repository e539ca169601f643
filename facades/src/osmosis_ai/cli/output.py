"""Prints results and errors as JSON, plain lines or text, and asks for confirmation."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import orjson
import typer

from osmosis_ai import __version__
from osmosis_ai.cli.figures import columns, plain
from osmosis_ai.cli.results import Listing, Mode, Result
from penstock.errors import PenstockError

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
