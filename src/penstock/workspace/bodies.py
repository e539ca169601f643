"""An experiment file's tables as the body of a submission, and back."""

from collections.abc import Mapping
from typing import Any

BODY = {
    "experiment": "experiment_config",
    "evaluation": "evaluation_config",
    "training": "training_config",
    "sampling": "sampling_config",
    "checkpoints": "checkpoints_config",
    "advanced": "advanced_config",
    "env": "env_config",
    "secrets": "secrets",
    "workflow": "workflow_config",
    "grader": "grader_config",
}
"""What each table of the file is called in a body."""
TABLES = {key: table for table, key in BODY.items()}


def to_body(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The body that submits an experiment file; empty tables are left out."""
    return {BODY[table]: values for table, values in tables.items() if table in BODY and values}


def to_tables(body: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment file that a body was made of. Keys of a body that are no tables are left out."""
    return {TABLES[key]: values for key, values in body.items() if key in TABLES and values is not None}
