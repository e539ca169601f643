"""An experiment file: what is run, with which model, on which dataset, and how that becomes the config of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.config import flaws
from penstock.errors import Issue, several
from penstock.workspace.advanced import read_advanced
from penstock.workspace.layout import ROLLOUTS
from penstock.workspace.policies import endpoint_engine, policy
from penstock.workspace.sections import FILES, EvalFile, Kind, TrainFile

OWN = {"eval": ("evaluation",), "train": ("training", "sampling", "checkpoints")}
"""Tables that only files of one kind have."""
COMMANDS = {"eval": "penstock eval run", "train": "penstock train"}
LONGEST_REPLY = 8192
"""Cap of one reply in an evaluation, whose file has no key for it; the default of `training.max_response_length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A file that was read and checked; nothing that it names was looked for yet."""

    kind: Kind
    file: EvalFile | TrainFile
    """All of its tables."""
    tables: dict[str, Any]
    """The same as they were written."""
    advanced: dict[str, dict[str, Any]]
    """Tables of a run's config that it sets by itself."""
    warnings: tuple[Issue, ...]
    """What is kept and changes nothing."""

    @property
    def rollout(self) -> str:
        """Name of its folder under rollouts/."""
        return self.file.experiment.rollout

    @property
    def entrypoint(self) -> str:
        """The file in that folder."""
        return self.file.experiment.entrypoint

    @property
    def model_path(self) -> str:
        """What is to answer."""
        return self.file.experiment.model_path

    @property
    def dataset(self) -> str:
        """A name, or the path of a file."""
        return self.file.experiment.dataset

    @property
    def branch(self) -> str | None:
        """Whose code is run; None where the file says nothing."""
        return self.file.experiment.branch

    @property
    def commit_sha(self) -> str | None:
        """The commit whose code is run, perhaps shortened."""
        return self.file.experiment.commit_sha

    @property
    def env(self) -> dict[str, str]:
        """Variables for the run's process."""
        return dict(self.file.env)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the variables whose values are kept elsewhere."""
        return tuple(self.file.secrets.required)

    def run_config(self, *, code: Path, dataset: Path, rows: int, model: str | None = None) -> dict[str, Any]:
        """The tables that `make_config` takes, with absolute paths.

        `code` is the workspace, or a copy of it; `rows` those of `dataset`; `model` stands in for the file's `model_path`.
        """
        where = f"the experiment {self.rollout!r}"
        folder = self._folder(code, where)
        tree: dict[str, Any] = {
            "run": {"name": self.rollout},
            "agent": {"entry": str(folder / self.entrypoint), "folder": str(folder)},
            "dataset": {"train": str(dataset.resolve())},
            **({"model": {"name": model}} if model is not None else policy(self.model_path, code, where)),
            "workflow": self.file.workflow,
            "grader": self.file.grader,
        }
        merge(tree, _evaluation(self.file, rows) if isinstance(self.file, EvalFile) else _training(self.file, rows))
        further = {section: dict(values) for section, values in self.advanced.items()}
        for section, key, base in (("dataset", "eval", code), ("agent", "flows", folder), ("agent", "folder", folder)):
            if isinstance(path := further.get(section, {}).get(key), str):
                further[section][key] = str((base / path).resolve())
        return merge(tree, further)

    def _folder(self, code: Path, where: str) -> Path:
        folder = (code / ROLLOUTS / self.rollout).resolve()
        if not folder.is_dir():
            there = sorted(path.name for path in (code / ROLLOUTS).glob("*") if path.is_dir())
            known = f"there are {', '.join(there)}" if there else f"make it with: penstock rollout init {self.rollout}"
            raise several(where, [Issue("experiment.rollout", f"no folder {ROLLOUTS}/{self.rollout}; {known}")])
        if not (folder / self.entrypoint).is_file():
            text = f"no file {ROLLOUTS}/{self.rollout}/{self.entrypoint}; check experiment.entrypoint"
            raise several(where, [Issue("experiment.entrypoint", text)])
        return folder


def is_experiment(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of an experiment file and not of a run's config."""
    return "experiment" in tables


def read_experiment(tables: Mapping[str, Any], kind: Kind, where: str) -> Experiment:
    """Check all tables; ConfigError has an issue for everything that is wrong with them."""
    kinds = FILES[kind]
    issues = [*_of_other_kind(tables, kind), *_together(tables)]
    ours = {name: values for name, values in tables.items() if name not in OWN["train" if kind == "eval" else "eval"]}
    issues += flaws(kinds, ours)
    path = _table(tables, "experiment").get("model_path")
    engine = endpoint_engine(path) if isinstance(path, str) else None
    advanced = read_advanced(_table(tables, "advanced"), engine=engine)
    issues += advanced.wrong
    if kind == "train" and engine is not None:
        text = f"experiment.model_path = {path!r}: others hold its weights, so it cannot be trained"
        issues.append(Issue("experiment.model_path", f"{text}; name weights, such as smollm2-135m or hf:ORG/NAME"))
    if issues:
        raise several(where, issues)
    file = kinds.model_validate(ours)
    warnings = (*advanced.unknown, *_idle(file, advanced.tree))
    return Experiment(kind=kind, file=file, tables=dict(tables), advanced=advanced.tree, warnings=warnings)


def merge(tree: dict[str, Any], more: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`tree` with the keys of each table of `more`."""
    for section, values in more.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def _evaluation(file: EvalFile, rows: int) -> dict[str, dict[str, Any]]:
    given = file.evaluation
    powers = (2**power for power in range(given.n.bit_length()))
    limits: dict[str, Any] = {"agent_timeout_s": given.agent_workflow_timeout_s, "grader_timeout_s": given.grader_timeout_s}
    return {
        "rollout": limits | ({"concurrency": given.batch_size} if given.batch_size else {}),
        "eval": {
            "samples": given.n,
            "k": sorted({*powers, given.n}),
            "passes": given.pass_threshold,
            "rows": f"0-{min(given.limit, rows) - 1}" if given.limit and rows else "",
        },
        "sampling": {"max_tokens": LONGEST_REPLY},
    }


def _training(file: TrainFile, rows: int) -> dict[str, dict[str, Any]]:
    given, groups = file.training, max(1, min(file.training.rollout_batch_size, rows))
    return {
        "rollout": {
            "group_size": given.n_samples_per_prompt,
            "groups_per_step": groups,
            "agent_timeout_s": given.agent_workflow_timeout_s,
            "grader_timeout_s": given.grader_timeout_s,
        },
        "sampling": {
            "temperature": file.sampling.rollout_temperature,
            "top_p": file.sampling.rollout_top_p,
            "max_tokens": given.max_response_length,
        },
        "train": {
            "lr": given.lr,
            "steps": math.ceil(given.total_epochs * rows / groups),
            "eval_every": file.checkpoints.eval_interval,
            "checkpoint_every": file.checkpoints.checkpoint_save_freq,
        },
    }


def _of_other_kind(tables: Mapping[str, Any], kind: Kind) -> list[Issue]:
    other: Kind = "train" if kind == "eval" else "eval"
    word = "a training run" if kind == "eval" else "an evaluation"
    return [
        Issue(name, f"[{name}] is a table of {word}: run the file with `{COMMANDS[other]}`, or leave the table out")
        for name in OWN[other]
        if name in tables
    ]


def _together(tables: Mapping[str, Any]) -> list[Issue]:
    """What is wrong with keys only as they stand beside others."""
    issues: list[Issue] = []
    experiment, required = _table(tables, "experiment"), _table(tables, "secrets").get("required")
    if experiment.get("branch") is not None and experiment.get("commit_sha") is not None:
        issues.append(Issue("experiment.commit_sha", "experiment has both branch and commit_sha; keep one of them"))
    names = [name for name in cast("list[Any]", required) if isinstance(name, str)] if isinstance(required, list) else []
    for name in dict.fromkeys(names):
        if name in _table(tables, "env"):
            issues.append(Issue(f"env.{name}", f"{name} is in [env] and in secrets.required; keep it in one of them"))
    return issues


def _idle(file: EvalFile | TrainFile, advanced: Mapping[str, Mapping[str, Any]]) -> list[Issue]:
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
    """One that may be missing, or no table at all."""
    found = tables.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
