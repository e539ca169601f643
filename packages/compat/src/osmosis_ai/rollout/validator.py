"""Checks a workflow and a grader before a back end uses them."""

from dataclasses import dataclass, field
from typing import Any

from penstock_compat.rollout_server import backend
from penstock_compat.rollout_server.backend import BackendProblem as ValidationError

__all__ = ["ValidationError", "ValidationResult", "validate_backend"]


@dataclass
class ValidationResult:
    """All problems found, not only the first."""

    valid: bool
    errors: list[ValidationError]
    warnings: list[ValidationError] = field(default_factory=list[ValidationError])


def validate_backend(
    workflow_cls: Any, workflow_config: Any = None, grader_cls: Any = None, grader_config: Any = None
) -> ValidationResult:
    """Checks whether these can run. Each error has a `code` and a `message`."""
    problems = backend.validate_backend(workflow_cls, workflow_config, grader_cls, grader_config)
    return ValidationResult(valid=not problems, errors=problems)
