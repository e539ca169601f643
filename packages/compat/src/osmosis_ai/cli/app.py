"""The `osmosis` command: command tree and global flags. Results are printed, and errors become exit codes, here only."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from osmosis_ai import __version__
from osmosis_ai.cli import account, datasets, evals, models, secrets, training, workspace
from osmosis_ai.cli.connection import load_environment
from osmosis_ai.cli.output import CliError, Mode, Terminal
from penstock.errors import ConfigError, ControllerError, PenstockError

# Failures

STATUSES = {
    400: "VALIDATION",
    401: "AUTH_REQUIRED",
    404: "NOT_FOUND",
    409: "CONFLICT",
    426: "UPGRADE_REQUIRED",
    429: "RATE_LIMITED",
}
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer raises it for a command line that it cannot parse, but exports only its subclass BadParameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a command failed."""

    code: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exit_code: int = 1
    is_help: bool = False
    """Whether the message is the help text of a group that was called without a command."""
    is_bug: bool = False


def failure_of(error: Exception) -> Failure:
    match error:
        case CliError():
            return Failure(code=error.code, message=str(error), details=error.details)
        case ControllerError():
            return _refused(error)
        case ConfigError():
            issues = [{"key": issue.key, "message": issue.message, "key_correction": issue.correction} for issue in error.issues]
            details = {"issues": issues} if issues else {}
            return Failure(code="VALIDATION", message=_listed(str(error), issues), details=details)
        case PenstockError():
            return Failure(code="PLATFORM_ERROR", message=str(error))
        case UsageError():
            message = str(cast("Any", error).format_message())
            is_help = message.startswith("Usage:")
            return Failure(code="VALIDATION", message=message, exit_code=0 if is_help else 2, is_help=is_help)
        case _:
            details = {"exception_type": type(error).__name__}
            text = f"something in this program is wrong: {type(error).__name__}: {error}"
            return Failure(code="INTERNAL", message=text, details=details, is_bug=True)


def _refused(error: ControllerError) -> Failure:
    body = error.details
    named = {"platform_code": error.code, "field": body.get("field"), "status_code": error.status}
    details = body | {key: value for key, value in named.items() if value is not None}
    code = STATUSES.get(error.status or 0, "PLATFORM_ERROR")
    return Failure(code=code, message=_listed(str(error), body.get("issues")), details=details)


def _listed(message: str, issues: Any) -> str:
    """Appends the issues that the message does not contain."""
    lines = [_line(issue) for issue in cast("Sequence[Any]", issues)] if isinstance(issues, list) else []
    return "\n".join([message, *(f"  - {line}" for line in lines if line not in message)])


def _line(issue: Any) -> str:
    if not isinstance(issue, dict):
        return str(issue)
    fields = cast("dict[str, Any]", issue)
    meant = f" (did you mean '{fields['key_correction']}'?)" if fields.get("key_correction") else ""
    return f"{fields.get('key')}: {fields.get('message')}{meant}" if fields.get("key") else f"{fields.get('message')}{meant}"


# Commands

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
INTERRUPTED = 130
FLAGS = ("--json", "--plain")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=HELP_NAMES)
GROUPS = {
    "dataset": datasets.app,
    "train": training.app,
    "model": models.app,
    "eval": evals.app,
    "rollout": workspace.rollout_app,
    "template": workspace.template_app,
    "auth": account.app,
    "secret": secrets.app,
}
for name, group in GROUPS.items():
    app.add_typer(group, name=name)
app.command("doctor")(workspace.doctor)
app.command("upgrade")(workspace.upgrade)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; may stand anywhere on the line.")] = False,
    as_plain: Annotated[bool, typer.Option("--plain", help="Print lines for shell pipelines; may stand anywhere.")] = False,
) -> None:
    """Evaluate and train agents on a Penstock controller, with the commands of Osmosis.

    Without OSMOSIS_PLATFORM_URL a controller on this machine is used, and started where none runs.
    """
    del as_json, as_plain  # `run` removes both flags before typer parses the line
    if version:
        typer.echo(f"osmosis-ai {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]  # model text may not fit the terminal
    load_environment(Path.cwd())
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and prints its result. Returns the exit code."""
    flags, line = split_flags(arguments)
    terminal = Terminal(_mode(flags))
    try:
        if len(flags) > 1:
            raise typer.BadParameter("--json and --plain cannot be combined")
        result: Any = app(line, prog_name="osmosis", standalone_mode=False, obj=terminal)
        return result if isinstance(result, int) else 0 if result is None else terminal.show(result)
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        if terminal.mode != "json":
            typer.echo("\nosmosis: stopped by Ctrl-C", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit fails again
        return 1
    except Exception as error:
        failure = failure_of(error)
        if failure.is_bug and terminal.mode == "human":
            raise
        _report(terminal, failure, line)
        return failure.exit_code


def split_flags(arguments: Sequence[str]) -> tuple[set[str], list[str]]:
    """Returns the global flags found anywhere before `--`, and the line without them."""
    before = list(takewhile(lambda word: word != "--", arguments))
    rest = [word for word in before if word not in FLAGS]
    return set(before) & set(FLAGS), [*rest, *arguments[len(before) :]]


def command_of(line: Sequence[str]) -> str:
    """Returns the command's name, such as `eval submit`, for error messages."""
    words = [word for word in line if not word.startswith("-")]
    return " ".join(words[: 2 if words[:1] and words[0] in GROUPS else 1]) or "<root>"


def _mode(flags: set[str]) -> Mode:
    return "json" if "--json" in flags else "plain" if "--plain" in flags else "human"


def _report(terminal: Terminal, failure: Failure, line: Sequence[str]) -> None:
    if failure.is_help:
        typer.echo(failure.message, err=terminal.mode == "json")
    else:
        terminal.fail(failure.message, failure.code, command_of(line), failure.details)
