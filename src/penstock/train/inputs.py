"""What the user gave, read and checked before anything heavy is loaded: a mistake costs a moment and leaves no run folder."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import RunConfig
from penstock.engines import ENGINES
from penstock.errors import ConfigError
from penstock.events import Listener
from penstock.models import ModelFolder, cached, resolve
from penstock.pool import POOLS
from penstock.records import Task
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.executors.base import read_section
from penstock.sdk.agents import open_agent
from penstock.sdk.dataset import check_readable, load_tasks
from penstock.sdk.discovery import Agent
from penstock.sdk.flows.agent import check_rows, is_flow_agent, told_of_run
from penstock.sdk.preflight import preflight
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
    """The start policy's files."""


def read_inputs(config: RunConfig, listener: Listener) -> Inputs:
    """Read and check all of it, the cheap first; ConfigError names the first thing that is wrong."""
    _check_names(config)
    _check_port(config.gateway.host, config.gateway.port)
    executor = read_section(config.rollout.executor, config.executor)
    check_readable(config.dataset.train)
    preflight(config.agent, config.workflow, config.grader)
    agent = open_agent(config.agent, config.workflow, config.grader)
    tasks = _tasks(agent, config.dataset.train)
    heldout = _tasks(agent, config.dataset.eval, config.dataset.eval_limit) if config.dataset.eval else []
    model = cached(config.model.name) or _pull(config.model.name, listener)
    config.engine.preflight(model.name)
    agent = told_of_run(agent, model=model.path, group_size=config.rollout.group_size)
    return Inputs(tasks=tasks, heldout=heldout, agent=agent, executor=executor, model=model.name, folder=model.path)


def _tasks(agent: Agent, path: Path, limit: int | None = None) -> list[Task]:
    tasks = load_tasks(path, limit=limit, columns=is_flow_agent(agent))
    check_rows(agent, tasks, path)
    return tasks


def _check_names(config: RunConfig) -> None:
    ENGINES.check(config.engine.name)
    if config.scale.address and config.scale.name == "none":
        raise ConfigError("scale.address has no meaning for scale.name = 'none'; leave it out, or name 'ray'")
    POOLS.check(config.pool.name)
    if config.pool.name == "postgres":
        from penstock.pool.postgres import check_url

        check_url(config.pool.url)
    elif config.pool.url:
        raise ConfigError(f"pool.url has no meaning for pool.name = {config.pool.name!r}; leave it out, or name 'postgres'")
    EXECUTORS.check(config.rollout.executor)
    ADVANTAGES.check(config.train.advantage)
    LOSSES.check(config.train.loss)


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
