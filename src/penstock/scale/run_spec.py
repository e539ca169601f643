"""A run's specification for other processes: a file in the run folder, from which they make the same config and inputs."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock.codec import from_json, to_json
from penstock.config import AgentSection, RunConfig, make_config
from penstock.errors import ConfigError
from penstock.records import Task
from penstock.rollout.executors.base import read_section
from penstock.run.folder import RunFolder
from penstock.run.inputs import Inputs
from penstock.sdk.discovery import Agent, AgentSpec
from penstock.sdk.workflow import AgentWorkflow
from penstock.system.files import FileLock, write_file

FILE = ".sent.json"
LOCK_WAIT_S = 60.0
"""How long processes of a killed run may take to end."""


@asynccontextmanager
async def exclusive_process(path: Path) -> AsyncGenerator[None]:
    """Hold the lock file `path`: processes of a killed run must have ended before the next ones touch its folder."""
    with FileLock(path) as lock:
        if not await lock.wait_async(LOCK_WAIT_S):
            raise ConfigError(f"{path}: another process is at work on this run; wait for it or pick another run.name")
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Paths in it are absolute, as the other process may have another working directory.

    A file rather than an actor's argument, so that an actor that Ray restarts, much later, still finds it.
    """

    config: dict[str, Any]
    agent_spec: str
    tasks: tuple[Task, ...]
    heldout: tuple[Task, ...]
    model: str
    model_folder: str
    run_folder: str
    threads: int
    """For torch: as many as in the driver, where Ray would set one."""

    @classmethod
    def of(cls, config: RunConfig, inputs: Inputs, folder: RunFolder, *, threads: int) -> Self:
        """Returns the specification of a run."""
        run = config.run.model_copy(update={"folder": config.run.folder.absolute()})
        tree = config.model_copy(update={"run": run, "agent": _absolute(config.agent)}).model_dump(mode="json")
        return cls(
            config=tree,
            agent_spec=portable_agent_spec(inputs.agent).decode(),
            tasks=tuple(inputs.tasks),
            heldout=tuple(inputs.heldout),
            model=inputs.model,
            model_folder=str(inputs.folder.absolute()),
            run_folder=str(folder.path.absolute()),
            threads=threads,
        )

    @classmethod
    def read(cls, folder: str) -> Self:
        return from_json(cls, (Path(folder) / FILE).read_bytes())

    def write(self) -> str:
        """Write the file; returns the path of the run's folder."""
        try:
            write_file(Path(self.run_folder) / FILE, to_json(self))
        except ValueError as cause:
            raise ConfigError(f"the run cannot be sent to other processes: {cause}") from cause
        return self.run_folder

    def make_config(self) -> RunConfig:
        return make_config(self.config, "the run's config")

    def make_inputs(self, config: RunConfig, agent: Agent | None = None) -> Inputs:
        """Returns the run's inputs; without `agent`, for a process that runs none and does not import the author's file."""
        return Inputs(
            tasks=list(self.tasks),
            heldout=list(self.heldout),
            agent=agent or _no_agent(config),
            executor=read_section(config.rollout.executor, config.executor),
            model=self.model,
            folder=Path(self.model_folder),
        )

    def load_agent(self) -> Agent:
        return AgentSpec.read(self.agent_spec.encode()).load()

    def make_folder(self, *, resumed: bool) -> RunFolder:
        return RunFolder(Path(self.run_folder), resumed=resumed)


def portable_agent_spec(agent: Agent) -> bytes:
    """Returns the agent's spec with absolute paths, for a process with another working directory."""
    return AgentSpec.from_config(_absolute(agent.source), *agent.tables).write()


def _absolute(source: AgentSection) -> AgentSection:
    flows = source.flows and source.flows.absolute()
    return source.model_copy(update={"entry": source.entry.absolute(), "flows": flows, "folder": source.folder.absolute()})


def _no_agent(config: RunConfig) -> Agent:
    return Agent(entry=config.agent.entry, workflow=AgentWorkflow, workflow_config=None, grader=None, grader_config=None)
