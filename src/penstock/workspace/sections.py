"""The tables of an experiment file, with their defaults and validation."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from penstock.config import Section
from penstock.workspace.layout import ROLLOUT_NAME

RunKind = Literal["eval", "train"]

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
SECRET = re.compile(r"[A-Z][A-Z0-9_]*")
RESERVED = "_OSMOSIS_"
PLACEHOLDER = "openai/osmosis-rollout"
"""The name by which agents call the policy; no model has it."""


def _folder_name(text: str) -> str:
    if ROLLOUT_NAME.fullmatch(text):
        return text
    raise ValueError("is the name of one folder under rollouts/; write it without slashes or blanks")


def _entrypoint(text: str) -> str:
    path = PurePosixPath(text)
    if path.suffix == ".py" and not path.is_absolute() and ".." not in path.parts:
        return text
    raise ValueError("is a .py file inside the rollout's folder; write its path from there, such as main.py")


def _not_blank(text: str) -> str:
    if text.strip():
        return text
    raise ValueError("is empty; write its name")


def _model_path(text: str) -> str:
    if _not_blank(text) != PLACEHOLDER:
        return text
    raise ValueError("is what agents call the policy; name the model that is to answer")


def _commit(text: str) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{7,40}", text):
        return text
    raise ValueError("is no commit; write 7 to 40 hexadecimal digits")


def _variable_name(name: str) -> str:
    if not VARIABLE.fullmatch(name):
        raise ValueError("is no name of a variable; use A-Z, 0-9 and _")
    if name.startswith(RESERVED):
        raise ValueError(f"names that begin with {RESERVED} are reserved; choose another")
    return name


def _secret_names(names: list[str]) -> list[str]:
    for name in names:
        if not SECRET.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a secret; use A-Z, 0-9 and _, a letter first")
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice; keep one")
    return names


class StrictSection(Section):
    """A table without type coercion: `"8"` is no number."""

    model_config = ConfigDict(strict=True)


class ExperimentTable(StrictSection):
    """`[experiment]`: code, model and dataset."""

    rollout: Annotated[str, AfterValidator(_folder_name)]
    """Folder under rollouts/."""
    entrypoint: Annotated[str, AfterValidator(_entrypoint)]
    """File in that folder."""
    model_path: Annotated[str, AfterValidator(_model_path)]
    dataset: Annotated[str, AfterValidator(_not_blank)]
    """A name, or the path of a file."""
    branch: Annotated[str, AfterValidator(_not_blank)] | None = None
    commit_sha: Annotated[str, AfterValidator(_commit)] | None = None


class EvaluationTable(StrictSection):
    limit: int | None = Field(default=None, ge=1)
    """The first rows to run; None runs all."""
    n: int = Field(default=1, ge=1)
    """Attempts at each row."""
    batch_size: int | None = Field(default=None, ge=1)
    """Concurrent rollouts; None uses `rollout.concurrency`."""
    pass_threshold: float = 1.0
    agent_workflow_timeout_s: float = Field(default=450.0, gt=0)
    grader_timeout_s: float = Field(default=150.0, gt=0)


class TrainingTable(StrictSection):
    lr: float = Field(default=1e-6, ge=0)
    total_epochs: int = Field(default=1, ge=1)
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Attempts at each row."""
    rollout_batch_size: int = Field(default=32, ge=1)
    """Rows in each step."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    max_response_length: int = Field(default=8192, ge=1)
    agent_workflow_timeout_s: float = Field(default=450.0, gt=0)
    grader_timeout_s: float = Field(default=150.0, gt=0)


class SamplingTable(StrictSection):
    rollout_temperature: float = Field(default=1.0, ge=0)
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)


class CheckpointsTable(StrictSection):
    """`[checkpoints]`: intervals in steps."""

    eval_interval: int = Field(default=10, ge=1)
    checkpoint_save_freq: int = Field(default=20, ge=1)


class SecretsTable(StrictSection):
    """`[secrets]`: names only, no values."""

    required: Annotated[list[str], AfterValidator(_secret_names)] = Field(default_factory=list[str])


class ExperimentFile(StrictSection):
    """The tables of both kinds of files."""

    experiment: ExperimentTable
    env: dict[Annotated[str, AfterValidator(_variable_name)], str] = Field(default_factory=dict[str, str])
    secrets: SecretsTable = SecretsTable()
    advanced: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further keys of a run config."""
    workflow: dict[str, Any] = Field(default_factory=dict[str, Any])
    grader: dict[str, Any] = Field(default_factory=dict[str, Any])


class EvalFile(ExperimentFile):
    evaluation: EvaluationTable = EvaluationTable()


class TrainFile(ExperimentFile):
    training: TrainingTable = TrainingTable()
    sampling: SamplingTable = SamplingTable()
    checkpoints: CheckpointsTable = CheckpointsTable()


FILE_MODELS: dict[RunKind, type[EvalFile] | type[TrainFile]] = {"eval": EvalFile, "train": TrainFile}
