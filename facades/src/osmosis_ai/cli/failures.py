"""Converts errors for scripts: a code from a fixed set, message, details and exit code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import typer

from osmosis_ai.cli.output import CliError
from penstock.errors import ConfigError, ControllerError, PenstockError

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
