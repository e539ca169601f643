"""Runs each workflow and each grader in its own process: it may block, crash, leak or fork, and is killed with all it started."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import Field

from penstock.codec import to_json
from penstock.config import Section
from penstock.errors import ConfigError, GraderError, WorkerLost, WorkflowError
from penstock.records import Task
from penstock.rollout.author_tasks import make_slots
from penstock.rollout.executors.base import (
    PACKAGE,
    Executor,
    ExecutorContext,
    GatewaySession,
    SessionSpec,
    announce_sandbox,
    visible_paths,
)
from penstock.rollout.in_process import Reward, WorkflowResult
from penstock.rollout.processes.fork_client import ForkClient, ProcessDied
from penstock.rollout.processes.job_protocol import AgentJob, JobKind, JobResult, JobSandbox, write_samples
from penstock.sdk.discovery import AgentSpec
from penstock.sdk.samples import RolloutSample
from penstock.system.sandbox import SandboxWish, choose_sandbox, new_user_id


class ProcessSection(Section):
    """`[executor]` for `rollout.executor = "process"`."""

    memory_mb: int | None = Field(default=None, ge=1)
    """Memory that one process may take beyond what it has when it starts; past it, Python raises MemoryError. Linux only."""
    grace_s: float = Field(default=2.0, ge=0)
    """How long a late or cancelled agent may clean up before it is killed."""
    fresh: bool = False
    """Start a new interpreter for each process and import the agent there. The default is to fork one that has imported it: much
    faster, but only safe if the import leaves nothing running in the background; set automatically where it leaves threads.
    With it, clients that are made on import find the rollout by the environment too."""
    start_s: float = Field(default=60.0, gt=0)
    """Longest time in which the agent must have been imported."""
    sandbox: SandboxWish = "auto"
    """What keeps the run's files and other processes from a workflow: `bubblewrap`, here the same namespaces without that program;
    `user`, a separate user id, which needs root; `off`; or `auto`, the first that the machine allows."""


class ProcessExecutor(Executor):
    """Has one agent loaded in a fork server, which forks a process for each workflow and each grader."""

    section = ProcessSection

    def __init__(self, context: ExecutorContext) -> None:
        agent, section = context.agent, context.section or ProcessSection()
        self._context = context
        self._settings: ProcessSection = section
        self._spec = AgentSpec.of(agent).write()
        self._fork_client = ForkClient(agent, fresh=section.fresh, start_s=section.start_s)
        self._sandbox = JobSandbox(name="off")
        self._workflow_slots = make_slots(agent.workflow_config and agent.workflow_config.concurrency)
        self._grader_slots = make_slots(agent.grader_config and agent.grader_config.concurrency)

    async def __aenter__(self) -> Self:
        await self._fork_client.__aenter__()
        try:
            self._sandbox = self._choose_sandbox()
        except BaseException as error:
            await self._fork_client.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    def _choose_sandbox(self) -> JobSandbox:
        context, wish, why = self._context, self._settings.sandbox, self._fork_client.why_no_namespaces
        if wish in ("auto", "bubblewrap") and not why:
            sandbox = JobSandbox(name="namespaces")
        else:
            if wish == "bubblewrap":
                raise ConfigError(f"executor.sandbox = 'bubblewrap': processes cannot be confined: {why}")
            needs = [context.agent.entry.parent, context.agent.source.folder, Path(sys.executable), Path(sys.prefix), PACKAGE]
            chosen = choose_sandbox(wish, needs=needs, auto=("user",))
            reason = f"namespaces: {why}; {chosen.reason}" if wish == "auto" else chosen.reason
            announce_sandbox(context, replace(chosen, reason=reason))
            sandbox = JobSandbox(name="user" if chosen.name == "user" else "off")
        return replace(
            sandbox,
            hidden=tuple(map(str, (*context.hidden, context.scratch.root))),
            readonly=tuple(str(path) for path in (context.agent.entry, PACKAGE) if path.exists()),
            visible=tuple(map(str, visible_paths(context))),
        )

    def _job_sandbox(self, folder: Path | None) -> JobSandbox:
        if self._sandbox.name != "user":
            return self._sandbox
        user = new_user_id()
        if folder is not None:
            os.chown(folder, user, user)
        return replace(self._sandbox, user=user)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._fork_client.__aexit__(kind, error, trace)

    async def run(self, task: Task, session: GatewaySession, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        async with self._workflow_slots:
            task = replace(task, label=None)  # the agent's process must not see it
            result = await self._run_job("workflow", task, rollout_id, timeout_s, session=session)
        return WorkflowResult(result.samples, result.direct_calls, result.returned)

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        async with self._grader_slots:
            result = await self._run_job("grader", task, rollout_id, timeout_s, samples=samples)
        return result.rewards

    async def _run_job(
        self,
        kind: JobKind,
        task: Task,
        rollout_id: str,
        timeout_s: float,
        *,
        session: GatewaySession | None = None,
        samples: Mapping[str, RolloutSample] | None = None,
    ) -> JobResult:
        async with self._folder(kind, rollout_id) as folder:
            log = folder and folder / f"{kind}-output.log"
            job = AgentJob(
                kind=kind,
                task=task,
                session=SessionSpec.of(session, self._context.agent) if session else None,
                timeout_s=timeout_s,
                grace_s=self._settings.grace_s,
                memory_mb=self._settings.memory_mb,
                artifacts_dir=str(folder) if folder else None,
                log=str(log) if log else None,
                sandbox=self._job_sandbox(folder) if kind == "workflow" else None,
            )
            try:
                result = await self._result(job, write_samples(samples or {}))
            except ProcessDied as died:
                kept = log and self._context.artifacts and self._context.artifacts / rollout_id / log.name
                raise self._error(kind, f"its process {died}{_output_hint(log, kept)}") from died
            finally:
                _remove_if_empty(log)
        if isinstance(error := result.error(), WorkerLost):  # only we can lose a process; its agent would be sampled again
            error = WorkflowError(str(error))
        if error:
            raise self._with_memory_hint(error)
        return result

    @asynccontextmanager
    async def _folder(self, kind: JobKind, rollout_id: str) -> AsyncGenerator[Path | None]:
        if kind == "grader":
            with self._context.artifacts_dir(rollout_id) as folder:
                yield folder
            return
        async with self._context.workflow_dir(rollout_id) as folder:
            if folder is not None:
                folder.parent.mkdir(mode=0o711)
                folder.mkdir(mode=0o700)
            yield folder

    async def _result(self, job: AgentJob, samples: bytes) -> JobResult:
        try:
            frames = (self._spec, to_json(job), samples)
        except ValueError as cause:
            raise self._error(job.kind, f"task {job.task.id!r} cannot be sent to its process: {cause}") from cause
        async with self._fork_client.job(job.grace_s) as process:
            try:
                async with asyncio.timeout(self._settings.start_s):
                    await process.send(*frames)
                    started = await process.receive()
            except TimeoutError:
                raise ProcessDied(f"did not begin within executor.start_s = {self._settings.start_s:g}; raise it") from None
            try:
                if not (result := JobResult.read(started)).error_kind:  # an error here: the agent could not be loaded
                    async with asyncio.timeout(job.timeout_s + job.grace_s):
                        result = JobResult.read(await process.receive())
            except ValueError as cause:
                raise ProcessDied("sent something that is no result: leave its sockets alone") from cause
            return result

    def _error(self, kind: JobKind, text: str) -> WorkflowError | GraderError:
        agent = self._context.agent
        if kind == "workflow":
            return WorkflowError(f"workflow {agent.workflow.__name__!r}: {text}")
        return GraderError(f"grader {agent.grader_name!r}: {text}")

    def _with_memory_hint(self, error: Exception) -> Exception:
        limit = self._settings.memory_mb
        if limit is None or "MemoryError" not in str(error):
            return error
        return type(error)(f"{error}; raise executor.memory_mb = {limit} or use less")


def _output_hint(log: Path | None, kept: Path | None) -> str:
    try:
        return f"; its output is in {kept}" if log and log.stat().st_size else ""
    except OSError:
        return ""


def _remove_if_empty(log: Path | None) -> None:
    with suppress(OSError):
        if log and log.stat().st_size == 0:
            log.unlink()
