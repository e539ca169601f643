"""What the user gave, read and checked before anything heavy is loaded: a mistake costs a moment and leaves no run folder."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import RunConfig
from penstock.engines import ENGINES
from penstock.errors import ConfigError, Problems
from penstock.events import Listener
from penstock.models import ModelFolder, cached, resolve
from penstock.pool import POOLS
from penstock.records import Task
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.executors.base import read_section
from penstock.run.agent_preflight import Tried, preflight
from penstock.sdk.dataset import check_tasks, load_tasks
from penstock.sdk.discovery import Agent, open_agent
from penstock.sdk.flows.agent import check_rows, is_flow_agent, told_of_run
from penstock.train import LOSSES
from penstock.train.advantages import ADVANTAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Tasks, agent and start policy of a run."""

    tasks: list[Task]
    heldout: list[Task]
    agent: Agent
    executor: Any
    """Settings of the executor."""
    model: str
    folder: Path
    """The start policy's files; empty where an endpoint answers that keeps its weights to itself."""


def read_inputs(config: RunConfig, listener: Listener) -> Inputs:
    """Read and check all of it; ConfigError names everything that is wrong. A model is pulled only where all else is right."""
    problems = Problems()
    seen = examine(config, problems)
    if seen.agent is None:
        check_datasets(config, None, problems)
        problems.refuse(_name(config))
    agent = open_agent(config.agent, config.workflow, config.grader)
    tasks, heldout = list[Task](), list[Task]()
    with problems.noting("dataset.train"):
        tasks = _tasks(agent, config.dataset.train)
    with problems.noting("dataset.eval"):
        heldout = _tasks(agent, config.dataset.eval, config.dataset.eval_limit) if config.dataset.eval else heldout
    problems.refuse(_name(config))
    model = _policy(config, listener)
    config.engine.preflight(model.name)
    agent = told_of_run(agent, model=model.path, group_size=config.rollout.group_size)
    return Inputs(tasks=tasks, heldout=heldout, agent=agent, executor=seen.executor, model=model.name, folder=model.path)


class Examined(NamedTuple):
    """What was found on the way."""

    executor: Any
    """Settings of the executor; None where they are wrong."""
    agent: Tried | None
    """None where it cannot be run."""


def examine(config: RunConfig, problems: Problems) -> Examined:
    """Look at all but the datasets' rows, without loading the agent's code here; what is wrong is noted."""
    _check_names(config, problems)
    with problems.noting("gateway.port"):
        _check_port(config.gateway.host, config.gateway.port)
    executor = agent = None
    with problems.noting("executor", table=True):
        executor = read_section(config.rollout.executor, config.executor)
    with problems.noting("agent"):
        agent = preflight(config.agent, config.workflow, config.grader)
    if not config.engine.relays:
        with problems.noting("model.name"):
            cached(config.model.name)
    return Examined(executor, agent)


def check_datasets(config: RunConfig, columns: bool | None, problems: Problems) -> None:
    """Read both files to their ends and note their bad rows; see `check_tasks`."""
    for key, path in (("dataset.train", config.dataset.train), ("dataset.eval", config.dataset.eval)):
        with problems.noting(key):
            _ = path and check_tasks(path, columns=columns)


def _name(config: RunConfig) -> str:
    return f"the run {config.run.name!r}"


def _tasks(agent: Agent, path: Path, limit: int | None = None) -> list[Task]:
    tasks = load_tasks(path, limit=limit, columns=is_flow_agent(agent))
    check_rows(agent, tasks, path)
    return tasks


def _check_names(config: RunConfig, problems: Problems) -> None:
    names = (
        ("engine.name", ENGINES, config.engine.name),
        ("pool.name", POOLS, config.pool.name),
        ("rollout.executor", EXECUTORS, config.rollout.executor),
        ("train.advantage", ADVANTAGES, config.train.advantage),
        ("train.loss", LOSSES, config.train.loss),
    )
    for key, table, name in names:
        with problems.noting(key):
            table.check(name)
    with problems.noting("scale.address"):
        if config.scale.address and config.scale.name == "none":
            raise ConfigError("scale.address has no meaning for scale.name = 'none'; leave it out, or name 'ray'")
    with problems.noting("pool.url"):
        if "pool.name" not in dict(problems.errors):
            POOLS.load(config.pool.name).check_url(config.pool.url)


def _policy(config: RunConfig, listener: Listener) -> ModelFolder:
    """The start policy's files; a path of none where the engine asks an endpoint for text."""
    if config.engine.relays:
        return ModelFolder(name=config.model.name, path=Path())
    return cached(config.model.name) or _pull(config.model.name, listener)


def _pull(name: str, listener: Listener) -> ModelFolder:
    def tell(stage: str, done: int = 0, total: int | None = None) -> None:
        listener("stage", {"text": stage, "done": done, "total": total})

    return resolve(name, tell)


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as cause:
            text = f"gateway.port = {port} on {host} cannot be used: {cause.strerror}; set another, or 0 for any free one"
            raise ConfigError(text) from cause
