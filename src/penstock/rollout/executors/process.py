"""Gives each workflow and each grader a process of its own: it may block, crash, leak or fork, and is ended with all it started."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import Field

from penstock.codec import to_json
from penstock.config import Section
from penstock.errors import GraderError, WorkflowError
from penstock.records import Task
from penstock.rollout.author_tasks import slots
from penstock.rollout.execution import Reward, WorkflowResult
from penstock.rollout.executors.base import Given, Seat, Session
from penstock.rollout.processes.fork_client import ForkClient, ProcessDied
from penstock.rollout.processes.job_protocol import Answer, Job, Kind, write_samples
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.samples import RolloutSample


class ProcessSection(Section):
    """`[executor]` for `rollout.executor = "process"`."""

    memory_mb: int | None = Field(default=None, ge=1)
    """Most memory that one process may take, beyond what it has when it begins; past it, Python raises MemoryError. Linux only."""
    grace_s: float = Field(default=2.0, ge=0)
    """How long a late or cancelled agent may clean up, before it is killed with all that it started."""
    fresh: bool = False
    """Start a new interpreter for each process, and import the agent there. The default is to fork one that has imported it: much
    faster, but only safe while nothing that the import started is running in the background. Threads are noticed, and have this
    done by themselves. With it, clients that are made on import find the rollout by the environment too."""
    start_s: float = Field(default=60.0, gt=0)
    """Longest time in which the agent must have been imported."""


class ProcessExecutor:
    """One agent, loaded once in a zygote, which forks a process for each workflow and each grader."""

    def __init__(self, given: Given) -> None:
        agent, section = given.agent, given.section or ProcessSection()
        self._given = given
        self._section: ProcessSection = section
        self._recipe = AgentSpec.of(agent).write()
        self._nursery = ForkClient(agent, fresh=section.fresh, start_s=section.start_s)
        self._workflow_slots = slots(agent.workflow_config and agent.workflow_config.concurrency)
        self._grader_slots = slots(agent.grader_config and agent.grader_config.concurrency)

    async def __aenter__(self) -> Self:
        await self._nursery.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._nursery.__aexit__(kind, error, trace)

    async def run(self, task: Task, session: Session, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        async with self._workflow_slots:
            task = replace(task, label=None)  # it does not even get where the agent is
            answer = await self._done("workflow", task, rollout_id, timeout_s, session=session)
        return WorkflowResult(answer.samples, answer.strays)

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        async with self._grader_slots:
            answer = await self._done("grader", task, rollout_id, timeout_s, samples=samples)
        return answer.rewards

    async def _done(
        self,
        kind: Kind,
        task: Task,
        rollout_id: str,
        timeout_s: float,
        *,
        session: Session | None = None,
        samples: Mapping[str, RolloutSample] | None = None,
    ) -> Answer:
        with self._given.artifacts_dir(rollout_id) as folder:
            log = folder and folder / f"{kind}-output.log"
            job = Job(
                kind=kind,
                task=task,
                seat=Seat.of(session, self._given.agent) if session else None,
                timeout_s=timeout_s,
                grace_s=self._section.grace_s,
                memory_mb=self._section.memory_mb,
                artifacts_dir=str(folder) if folder else None,
                log=str(log) if log else None,
            )
            try:
                answer = await self._answer(job, write_samples(samples or {}))
            except ProcessDied as died:
                raise self._named(kind, f"its process {died}{_hint(log)}") from died
            finally:
                _drop_empty(log)
        if error := answer.failure():
            raise self._explained(error)
        return answer

    async def _answer(self, job: Job, samples: bytes) -> Answer:
        try:
            frames = (self._recipe, to_json(job), samples)
        except ValueError as cause:
            raise self._named(job.kind, f"task {job.task.id!r} cannot be sent to its process: {cause}") from cause
        async with self._nursery.job(job.grace_s) as process:
            try:
                async with asyncio.timeout(self._section.start_s):
                    await process.say(*frames)
                    begun = await process.hear()
            except TimeoutError:
                raise ProcessDied(f"did not begin within executor.start_s = {self._section.start_s:g}; raise it") from None
            try:
                if not (answer := Answer.read(begun)).failed:
                    async with asyncio.timeout(job.timeout_s + job.grace_s):
                        answer = Answer.read(await process.hear())
            except ValueError as cause:
                raise ProcessDied("gave an answer that is none: leave its sockets alone") from cause
            return answer

    def _named(self, kind: Kind, text: str) -> WorkflowError | GraderError:
        agent = self._given.agent
        if kind == "workflow":
            return WorkflowError(f"workflow {agent.workflow.__name__!r}: {text}")
        return GraderError(f"grader {agent.grader_name!r}: {text}")

    def _explained(self, error: Exception) -> Exception:
        limit = self._section.memory_mb
        if limit is None or "MemoryError" not in str(error):
            return error
        return type(error)(f"{error}; raise executor.memory_mb = {limit} or use less")


def _hint(log: Path | None) -> str:
    """Where to look for more."""
    try:
        return f"; its output is in {log}" if log and log.stat().st_size else ""
    except OSError:
        return ""


def _drop_empty(log: Path | None) -> None:
    with suppress(OSError):
        if log and log.stat().st_size == 0:
            log.unlink()
