"""Experiment files of a workspace: their tables, checks, and conversion to run configs and request bodies."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.config import (
    EngineSection,
    RunConfig,
    RunKind,
    Section,
    engine_section,
    find_issues,
    make_config,
    override,
    read_toml,
)
from penstock.engines import ENGINES, SECTIONS
from penstock.errors import ConfigError, Issue, Problems, combine_issues
from penstock.run.inputs import check_kind
from penstock.sdk.dataset import count_rows
from penstock_controller.workspace import ROLLOUT_NAME, ROLLOUTS, workspace_of

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


BODY_KEYS = {
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
"""Key in the request body of each table."""
TABLE_NAMES = {key: table for table, key in BODY_KEYS.items()}
KIND_TABLES = {"eval": ("evaluation",), "train": ("training", "sampling", "checkpoints")}
"""Tables that belong to one kind of file only."""
MOVED_KEYS = {
    "agent.entry": "experiment.entrypoint",
    "dataset.train": "experiment.dataset",
    "model.name": "experiment.model_path",
    "workflow": "workflow",
    "grader": "grader",
}
"""Keys that must not be under `[advanced]`, and the keys to use instead."""
COMMANDS = {"eval": "penstock eval run", "train": "penstock train"}
DEFAULT_MAX_TOKENS = 8192
"""Tokens per reply in an evaluation, whose file has no key for it; equals the default of `training.max_response_length`."""
LITELLM_PROVIDERS = (
    *("azure", "bedrock", "cerebras", "cohere", "databricks", "deepinfra", "deepseek", "fireworks_ai", "gemini", "groq", "litellm"),
    *("mistral", "nvidia_nim", "ollama", "openrouter", "perplexity", "replicate", "sambanova", "together_ai", "vertex_ai", "xai"),
)
"""Providers that the `litellm` engine reaches."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^@\s]+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A checked experiment file. Whether the paths and names in it exist was not checked yet."""

    kind: RunKind
    file: EvalFile | TrainFile
    tables: dict[str, Any]
    """The tables as written."""
    advanced: dict[str, dict[str, Any]]
    """Run config tables from `[advanced]`."""
    warnings: tuple[Issue, ...]
    """Keys without an effect."""

    @property
    def rollout(self) -> str:
        return self.file.experiment.rollout

    @property
    def entrypoint(self) -> str:
        return self.file.experiment.entrypoint

    @property
    def model_path(self) -> str:
        return self.file.experiment.model_path

    @property
    def dataset(self) -> str:
        return self.file.experiment.dataset

    @property
    def branch(self) -> str | None:
        return self.file.experiment.branch

    @property
    def commit_sha(self) -> str | None:
        return self.file.experiment.commit_sha

    @property
    def env(self) -> dict[str, str]:
        return dict(self.file.env)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the required secrets."""
        return tuple(self.file.secrets.required)

    def run_config(self, *, code: Path, dataset: Path, rows: int, model: str | None = None) -> dict[str, Any]:
        """Returns the tables for `make_config`, with absolute paths.

        `code` is the workspace or a copy of it; `rows` is the row count of `dataset`; `model` replaces the file's `model_path`.
        """
        where = f"the experiment {self.rollout!r}"
        folder = self._folder(code, where)
        tree: dict[str, Any] = {
            "run": {"name": self.rollout},
            "agent": {"entry": str(folder / self.entrypoint), "folder": str(folder)},
            "dataset": {"train": str(dataset.resolve())},
            **({"model": {"name": model}} if model is not None else model_tables(self.model_path, code, where)),
            "workflow": self.file.workflow,
            "grader": self.file.grader,
        }
        merge_tables(
            tree, _evaluation_config(self.file, rows) if isinstance(self.file, EvalFile) else _training_config(self.file, rows)
        )
        advanced = {section: dict(values) for section, values in self.advanced.items()}
        for section, key, base in (("dataset", "eval", code), ("agent", "flows", folder), ("agent", "folder", folder)):
            if isinstance(path := advanced.get(section, {}).get(key), str):
                advanced[section][key] = str((base / path).resolve())
        return merge_tables(tree, advanced)

    def _folder(self, code: Path, where: str) -> Path:
        folder = (code / ROLLOUTS / self.rollout).resolve()
        if not folder.is_dir():
            there = sorted(path.name for path in (code / ROLLOUTS).glob("*") if path.is_dir())
            known = f"there are {', '.join(there)}" if there else f"make it with: penstock rollout init {self.rollout}"
            raise combine_issues(where, [Issue("experiment.rollout", f"no folder {ROLLOUTS}/{self.rollout}; {known}")])
        if not (folder / self.entrypoint).is_file():
            text = f"no file {ROLLOUTS}/{self.rollout}/{self.entrypoint}; check experiment.entrypoint"
            raise combine_issues(where, [Issue("experiment.entrypoint", text)])
        return folder


def is_experiment(tables: Mapping[str, Any]) -> bool:
    """Whether the tables are those of an experiment file, not of a run config."""
    return "experiment" in tables


def read_experiment(tables: Mapping[str, Any], kind: RunKind, where: str) -> Experiment:
    """Checks all tables; ConfigError lists all problems."""
    model = FILE_MODELS[kind]
    issues = [*_other_kind_tables(tables, kind), *_conflicts(tables)]
    ours = {name: values for name, values in tables.items() if name not in KIND_TABLES["train" if kind == "eval" else "eval"]}
    issues += find_issues(model, ours)
    path = _table(tables, "experiment").get("model_path")
    engine = endpoint_engine(path) if isinstance(path, str) else None
    advanced = read_advanced(_table(tables, "advanced"), engine=engine)
    issues += advanced.wrong
    if kind == "train" and engine is not None:
        text = f"experiment.model_path = {path!r}: others hold its weights, so it cannot be trained"
        issues.append(Issue("experiment.model_path", f"{text}; name weights, such as smollm2-135m or hf:ORG/NAME"))
    if issues:
        raise combine_issues(where, issues)
    file = model.model_validate(ours)
    warnings = (*advanced.unknown, *_unused_keys(file, advanced.tree))
    return Experiment(kind=kind, file=file, tables=dict(tables), advanced=advanced.tree, warnings=warnings)


def _other_kind_tables(tables: Mapping[str, Any], kind: RunKind) -> list[Issue]:
    other: RunKind = "train" if kind == "eval" else "eval"
    word = "a training run" if kind == "eval" else "an evaluation"
    return [
        Issue(name, f"[{name}] is a table of {word}: run the file with `{COMMANDS[other]}`, or leave the table out")
        for name in KIND_TABLES[other]
        if name in tables
    ]


def _conflicts(tables: Mapping[str, Any]) -> list[Issue]:
    """Returns issues with combinations of keys."""
    issues: list[Issue] = []
    experiment, required = _table(tables, "experiment"), _table(tables, "secrets").get("required")
    if experiment.get("branch") is not None and experiment.get("commit_sha") is not None:
        issues.append(Issue("experiment.commit_sha", "experiment has both branch and commit_sha; keep one of them"))
    names = [name for name in cast("list[Any]", required) if isinstance(name, str)] if isinstance(required, list) else []
    for name in dict.fromkeys(names):
        if name in _table(tables, "env"):
            issues.append(Issue(f"env.{name}", f"{name} is in [env] and in secrets.required; keep it in one of them"))
    return issues


def _unused_keys(file: EvalFile | TrainFile, advanced: Mapping[str, Mapping[str, Any]]) -> list[Issue]:
    if not isinstance(file, TrainFile):
        return []
    found: list[Issue] = []
    if file.training.max_prompt_length is not None:
        text = "training.max_prompt_length is kept with the run and bounds nothing: a prompt may fill the model's context"
        found.append(Issue("training.max_prompt_length", text))
    if "eval_interval" in file.checkpoints.model_fields_set and "eval" not in advanced.get("dataset", {}):
        text = "checkpoints.eval_interval needs held-out tasks; name them with: [advanced.dataset] eval = 'data/NAME.jsonl'"
        found.append(Issue("checkpoints.eval_interval", text))
    return found


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a table; empty if it is missing or no table."""
    found = tables.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


# Request bodies.


def to_body(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request body for an experiment file, without empty tables."""
    return {BODY_KEYS[table]: values for table, values in tables.items() if table in BODY_KEYS and values}


def to_tables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of a request body; ignores its other keys."""
    return {TABLE_NAMES[key]: values for key, values in body.items() if key in TABLE_NAMES and values is not None}


# Conversion to a run config.


def _evaluation_config(file: EvalFile, rows: int) -> dict[str, dict[str, Any]]:
    evaluation = file.evaluation
    powers = (2**power for power in range(evaluation.n.bit_length()))
    limits: dict[str, Any] = {
        "agent_timeout_s": evaluation.agent_workflow_timeout_s,
        "grader_timeout_s": evaluation.grader_timeout_s,
    }
    return {
        "rollout": limits | ({"concurrency": evaluation.batch_size} if evaluation.batch_size else {}),
        "eval": {
            "samples": evaluation.n,
            "k": sorted({*powers, evaluation.n}),
            "passes": evaluation.pass_threshold,
            "rows": f"0-{min(evaluation.limit, rows) - 1}" if evaluation.limit and rows else "",
        },
        "sampling": {"max_tokens": DEFAULT_MAX_TOKENS},
    }


def _training_config(file: TrainFile, rows: int) -> dict[str, dict[str, Any]]:
    training, groups = file.training, max(1, min(file.training.rollout_batch_size, rows))
    return {
        "rollout": {
            "group_size": training.n_samples_per_prompt,
            "groups_per_step": groups,
            "agent_timeout_s": training.agent_workflow_timeout_s,
            "grader_timeout_s": training.grader_timeout_s,
        },
        "sampling": {
            "temperature": file.sampling.rollout_temperature,
            "top_p": file.sampling.rollout_top_p,
            "max_tokens": training.max_response_length,
        },
        "train": {
            "lr": training.lr,
            "steps": math.ceil(training.total_epochs * rows / groups),
            "eval_every": file.checkpoints.eval_interval,
            "checkpoint_every": file.checkpoints.checkpoint_save_freq,
        },
    }


def merge_tables(tree: dict[str, Any], more: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Updates each table of `tree` with the keys of `more`; returns `tree`."""
    for section, values in more.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def model_tables(model_path: str, code: Path, where: str) -> dict[str, Any]:
    """Returns the `model` and `engine` tables for a model path. A local path is looked up under `code` first.

    `openai/NAME`, `anthropic/NAME` and `PROVIDER/NAME` of LiteLLM's are endpoints; any other `ORG/NAME` is one of Hugging Face.
    """
    if (code / model_path).exists():
        return {"model": {"name": str((code / model_path).resolve())}}
    engine = endpoint_engine(model_path)
    if engine is not None:
        _check_engine(engine, model_path, where)
        whole = engine == "litellm" and not model_path.startswith("litellm/")
        return {"model": {"name": model_path if whole else model_path.partition("/")[2]}, "engine": {"name": engine}}
    if HUB_NAME.fullmatch(model_path) and not Path(model_path).expanduser().exists():
        return {"model": {"name": f"hf:{model_path}"}}
    return {"model": {"name": model_path}}


def endpoint_engine(model_path: str) -> str | None:
    """The engine that asks others for text, where they hold the weights: it can be measured, not trained. None for weights."""
    provider, slash, _ = model_path.partition("/")
    if not slash:
        return None
    if provider in SECTIONS and engine_section(provider).text_only:
        return provider
    return "litellm" if provider in LITELLM_PROVIDERS else None


def _check_engine(name: str, model_path: str, where: str) -> None:
    try:
        ENGINES.check(name)
    except ConfigError as cause:
        text = f"experiment.model_path = {model_path!r}: no engine {name!r} is installed; name weights, such as smollm2-135m"
        raise combine_issues(where, [Issue("experiment.model_path", text)]) from cause


# The [advanced] table.


class AdvancedTables(NamedTuple):
    tree: dict[str, dict[str, Any]]
    """Tables of a run config."""
    unknown: tuple[Issue, ...]
    """Keys without an effect here; they are stored with the run."""
    wrong: tuple[Issue, ...]


def read_advanced(table: Mapping[str, Any], *, engine: str | None = None) -> AdvancedTables:
    """Sorts the keys; `[advanced.train] steps = 2` and `"train.steps" = 2` mean the same. `engine` is that of the model path."""
    tree: dict[str, dict[str, Any]] = {}
    unknown: list[Issue] = []
    wrong: list[Issue] = []
    kind = _engine_section(table, engine)
    for section, key, value in _flatten(table):
        name = f"{section}.{key}" if key else section
        if other := MOVED_KEYS.get(name) or MOVED_KEYS.get(section):
            wrong.append(Issue(f"advanced.{name}", f"advanced.{name}: {other} says that; write it there"))
        elif key and _known(section, key, kind):
            tree.setdefault(section, {})[key] = value
        else:
            unknown.append(Issue(f"advanced.{name}", f"advanced.{name} is kept with the run and changes nothing here"))
    return AdvancedTables(tree, tuple(unknown), tuple(wrong))


def _flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for key, value in table.items():
        section, _, rest = key.partition(".")
        if rest or not isinstance(value, Mapping):
            yield section, rest, value
        else:
            yield from ((section, inner_key, inner) for inner_key, inner in cast("Mapping[str, Any]", value).items())


def _engine_section(table: Mapping[str, Any], engine: str | None) -> type[BaseModel]:
    named = {f"{section}.{key}": value for section, key, value in _flatten(table)}.get("engine.name", engine)
    return engine_section(named) if isinstance(named, str) else EngineSection


def _known(section: str, key: str, engine: type[BaseModel]) -> bool:
    if section not in RunConfig.model_fields:
        return False
    kind: Any = engine if section == "engine" else RunConfig.model_fields[section].annotation
    return not (isinstance(kind, type) and issubclass(kind, BaseModel)) or key in kind.model_fields


def load_experiment(file: Path, overrides: Iterable[str], kind: RunKind, *, warn: Callable[[str], None]) -> RunConfig:
    """Reads an experiment file, applies overrides of run config keys and checks everything.

    Sets the variables under `[env]` in this process, for the agent.
    """
    experiment = read_experiment(read_toml(file), kind, str(file))
    workspace = workspace_of(file.parent)
    problems, config = Problems(), None
    with problems.noting("secrets.required"):
        _check_secrets(experiment, str(file))
    with problems.noting("experiment.dataset"):
        dataset = workspace.dataset(experiment.dataset)
        tree = experiment.run_config(code=workspace.path, dataset=dataset, rows=count_rows(dataset))
        tree["run"] = {"name": file.stem, "folder": str(workspace.path / "runs"), **experiment.advanced.get("run", {})}
        override(tree, overrides)
        if kind == "eval" and isinstance(samples := tree["eval"].get("samples"), int):
            tree["eval"]["k"] = [k for k in tree["eval"]["k"] if k <= samples]  # an override may have reduced the samples
        config = make_config(tree, str(file))
        check_kind(config, kind)
    problems.refuse(str(file))
    assert config is not None  # else that has raised
    for warning in experiment.warnings:
        warn(f"{file}: {warning.line}")
    os.environ.update(experiment.env)
    return config


def _check_secrets(experiment: Experiment, where: str) -> None:
    missing = [name for name in experiment.secrets if not os.environ.get(name)]
    if missing:
        text = "the environment has none; set it, or keep it with `penstock secret set` and submit the run"
        raise combine_issues(where, [Issue("secrets.required", f"{name}: {text}") for name in missing])
