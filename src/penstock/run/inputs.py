"""The inputs of a run, read and checked before anything heavy is loaded: a mistake costs a moment and leaves no run folder.

A config file with a table that a run config lacks may be in a format of another wheel: the table's name is looked up among the
entry points of the group `penstock.config_format`, and the `ConfigReader` found there makes the run config.
"""

import inspect
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.config import RunConfig, RunKind, load_config, read_toml
from penstock.engines import ENGINES
from penstock.engines.checkpoint_files import is_adapter
from penstock.errors import ConfigError, Problems, RenderError
from penstock.events import Listener
from penstock.models import ModelFolder, find_cached
from penstock.pool import POOLS
from penstock.records import Message, Task
from penstock.registry import Registry
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.executors.base import read_section
from penstock.run.agent_preflight import AgentTraits, check_agent, preflight
from penstock.run.policies import check_policy, pull_policies, refuse_untrainable_policies, saved_adapters, start_model
from penstock.run.tracking import check_trackers
from penstock.sdk.dataset import check_tasks, load_tasks
from penstock.sdk.discovery import Agent, open_agent

REGISTRIES = {"engine.name": ENGINES, "pool.name": POOLS}
"""By the config key that names one of their entries."""
Check = Callable[[RunConfig, Problems], None]


def no_check(config: RunConfig, problems: Problems) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Tasks, agent and start policy of a run."""

    tasks: list[Task]
    heldout: list[Task]
    agent: Agent
    executor: Any
    """The executor's section of the config."""
    model: str
    folder: Path
    """The start policy's files; `Path()` where the engine is an endpoint that keeps its weights to itself."""

    def files(self, config: RunConfig) -> list[tuple[Path, list[Task]]]:
        """Returns the dataset files, each once, with the tasks that were read from it."""
        heldout = config.dataset.eval
        named = [(config.dataset.train, self.tasks), *([(heldout, self.heldout)] if heldout else [])]
        return [(path, tasks) for path, tasks in named if path != heldout or tasks is self.heldout]


def read_inputs(
    config: RunConfig, listener: Listener, *, check: Check = no_check, all_heldout: bool = False, agent: Agent | None = None
) -> Inputs:
    """Read and check all inputs; one ConfigError lists everything that is wrong. The model is pulled only if nothing is.

    `check` notes further problems of the config. `all_heldout` reads `dataset.eval` beyond `dataset.eval_limit`.
    `agent` is one made from objects, in place of that of `[agent]`.
    """
    problems = Problems()
    checked = check_inputs(config, problems, check, agent)
    if checked.agent is None:
        check_datasets(config, None, problems)
        problems.refuse(_name(config))
    agent = agent or open_agent(config.agent, config.workflow, config.grader)
    tasks, heldout = list[Task](), list[Task]()
    with problems.noting("dataset.train"):
        tasks = _tasks(agent, config.dataset.train)
    if config.dataset.eval:
        with problems.noting("dataset.eval"):
            heldout = _tasks(agent, config.dataset.eval, None if all_heldout else config.dataset.eval_limit)
    problems.refuse(_name(config))
    model = _start_policy(config, listener)
    config.engine.preflight(model.name)
    pull_policies(config, listener)
    agent = agent.kind.with_run_settings(agent, model=model.path, group_size=config.rollout.group_size)
    inputs = Inputs(tasks=tasks, heldout=heldout, agent=agent, executor=checked.executor, model=model.name, folder=model.path)
    for path, rows in inputs.files(config):
        if text := missing_labels(rows, agent, path):
            listener("notice", {"text": text})
    return inputs


class CheckedInputs(NamedTuple):
    executor: Any
    """The executor's section of the config; None where it is wrong."""
    agent: AgentTraits | None
    """None where the agent cannot be run."""


def check_inputs(config: RunConfig, problems: Problems, check: Check = no_check, made: Agent | None = None) -> CheckedInputs:
    """Check all but the rows of the datasets, without importing the agent's code here; errors are noted in `problems`."""
    _check_names(config, problems)
    check(config, problems)
    with problems.noting("gateway.port"):
        _check_port(config.gateway.host, config.gateway.port)
    executor = agent = None
    with problems.noting("rollout.executor"):
        EXECUTORS.check(config.rollout.executor)
        with problems.noting("executor", table=True):
            executor = read_section(config.rollout.executor, config.executor)
    with problems.noting("agent"):
        agent = preflight(config.agent, config.workflow, config.grader) if made is None else check_agent(made)
    if not config.engine.text_only and not saved_adapters(config):
        with problems.noting("model.name"):
            find_cached(config.model.name)
    for name in config.policies:
        with problems.noting(f"policies.{name}"):
            check_policy(config, name)
    check_trackers(config, problems)
    return CheckedInputs(executor, agent)


def check_datasets(config: RunConfig, columns: bool | None, problems: Problems) -> None:
    """Read both files to their ends and note their bad rows; see `check_tasks`."""
    for key, path in (("dataset.train", config.dataset.train), ("dataset.eval", config.dataset.eval)):
        if path:
            with problems.noting(key):
                check_tasks(path, columns=columns)


def refuse_untrainable(config: RunConfig) -> None:
    """Raises ConfigError if the engine is an endpoint: its weights are not here, and its tokens are not known.

    Also if the start policy is an adapter, or its policies cannot be trained as they are configured.
    """
    refuse_untrainable_policies(config)
    if not config.engine.trainable:
        text = f"engine.name = {config.engine.name!r} asks an endpoint for text: there are no weights to train"
        raise ConfigError(f"{text}; name embedded, vllm or sglang, or measure it with: penstock eval run")
    model = find_cached(config.model.name)
    if model is not None and is_adapter(model.path):
        text = f"model.name = {config.model.name!r} is a LoRA adapter, and training starts from a model"
        raise ConfigError(f"{text}; make one of it with: penstock model merge {config.model.name} FOLDER")


def _name(config: RunConfig) -> str:
    return f"the run {config.run.name!r}"


def _tasks(agent: Agent, path: Path, limit: int | None = None) -> list[Task]:
    tasks = load_tasks(path, limit=limit, columns=agent.kind.keeps_columns)
    agent.kind.check_rows(agent, tasks, path)
    return tasks


def _check_names(config: RunConfig, problems: Problems) -> None:
    for key, registry in REGISTRIES.items():
        with problems.noting(key):
            registry.check(attrgetter(key)(config))
    with problems.noting("scale.address"):
        if config.scale.address and config.scale.name == "none":
            raise ConfigError("scale.address has no meaning for scale.name = 'none'; leave it out, or name 'ray'")
    with problems.noting("pool.url"):
        if "pool.name" not in dict(problems.errors):
            POOLS.load(config.pool.name).check_url(config.pool.url)


def _start_policy(config: RunConfig, listener: Listener) -> ModelFolder:
    if config.engine.text_only:
        return ModelFolder(name=config.model.name, path=Path())
    return start_model(config, listener)


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as cause:
            text = f"gateway.port = {port} on {host} cannot be used: {cause.strerror}; set another, or 0 for any free one"
            raise ConfigError(text) from cause


Render = Callable[[Sequence[Message]], Sequence[int]]
RENDERED = 200
"""Prompts that are rendered, the longest first: enough to say that there is one."""


def missing_labels(tasks: Sequence[Task], agent: Agent, path: Path) -> str:
    """Says how many rows have no label, if others have one or the grader's code speaks of it; else an empty string."""
    lacking = [number for number, task in enumerate(tasks) if task.label is None]
    if not lacking or (len(lacking) == len(tasks) and not _reads_label(agent)):
        return ""
    return (
        f"{path}: {len(lacking)} of {len(tasks)} rows have no label (the first is row {lacking[0]}), and ctx.label is None for the "
        "grader; add the column `label` to them, or let the grader do without"
    )


def _reads_label(agent: Agent) -> bool:
    try:
        return agent.grader is not None and ".label" in inspect.getsource(agent.grader)
    except (OSError, TypeError):  # no source
        return False


def long_prompts(tasks: Sequence[Task], render: Render, context_length: int, path: Path) -> str:
    """Says how many prompts leave no room for a reply in the model's context; else an empty string."""
    # No token is shorter than a byte, and half is left for what the template adds: short texts need not be rendered.
    sizes = [(sum(map(_bytes, task.prompt)), row) for row, task in enumerate(tasks)]
    longest = sorted((each for each in sizes if each[0] >= context_length // 2), reverse=True)[:RENDERED]
    found: list[tuple[int, int]] = []
    for _, row in longest:
        try:
            found.append((len(render(tasks[row].prompt)), row))
        except RenderError:  # the rollout will say so
            continue
    if not (beyond := [each for each in found if each[0] >= context_length]):
        return ""
    tokens, row = max(beyond)
    what = f"{path}: {len(beyond)} of {len(tasks)} prompts are longer than the model's context of {context_length:,} tokens"
    return (
        f"{what} (row {row} has {tokens:,}): a call with the whole prompt will fail; shorten them, leave these rows out, or take a "
        "model with a longer context"
    )


def _bytes(message: Message) -> int:
    return len(str(message.get("content") or "").encode("utf-8", "replace"))


class ConfigReader(Protocol):
    def __call__(self, file: Path, overrides: Iterable[str], kind: RunKind, *, warn: Callable[[str], None]) -> RunConfig: ...


CONFIG_FORMATS = Registry("config format", {})


def _ignore_warning(line: str) -> None:
    pass


def load_run_config(
    file: Path, overrides: Iterable[str], kind: RunKind, *, warn: Callable[[str], None] = _ignore_warning
) -> RunConfig:
    """Reads `file`, applies overrides of run config keys and checks everything; calls `warn` for keys without an effect."""
    tables = read_toml(file)
    for name in tables:
        if name not in RunConfig.model_fields and name in CONFIG_FORMATS:
            reader: ConfigReader = CONFIG_FORMATS.load(name)
            return reader(file, overrides, kind, warn=warn)
    if "experiment" in tables:
        raise ConfigError(f"{file} is an experiment file, which needs the package penstock-controller; install it")
    config = load_config(file, overrides)
    check_kind(config, kind)
    return config


def check_kind(config: RunConfig, kind: RunKind) -> None:
    """Raises ConfigError if the engine cannot do a run of this kind."""
    if kind == "train":
        refuse_untrainable(config)
