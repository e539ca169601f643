"""Runs workflows and graders on the workers of a Ray cluster."""

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pydantic import Field

from penstock.codec import to_json
from penstock.config import Section
from penstock.errors import GraderError, WorkflowError
from penstock.records import Task
from penstock.rollout.author_tasks import make_slots
from penstock.rollout.executors.base import (
    Executor,
    ExecutorContext,
    GatewaySession,
    SessionSpec,
    announce_trusted,
    starts_programs,
)
from penstock.rollout.in_process import Reward, WorkflowResult
from penstock.rollout.processes.job_protocol import AgentJob, JobKind, JobResult, JobSandbox, write_samples
from penstock.scale.cluster import live_nodes, on_node, open_cluster, own_node_id, reachable_url
from penstock.scale.manager import AgentFlowManager
from penstock.scale.package import ray
from penstock.scale.run_spec import portable_agent_spec
from penstock.scale.worker import AgentFlowWorker
from penstock.sdk.samples import RolloutSample
from penstock.system.sandbox import SandboxWish

NAMESPACE = "penstock"


class RaySection(Section):
    """`[executor]` for `rollout.executor = "ray"`."""

    address: str = ""
    """The address of a running cluster; empty starts one on this machine. Refused within `[scale] name = "ray"`."""
    workers: int = Field(default=2, ge=1)
    """Processes that run agents, spread over the nodes of the cluster."""
    concurrency: int = Field(default=256, ge=1)
    """Rollouts that one of them runs at once; more wait in the queue for whichever has room first."""
    cpus: float = Field(default=0.0, ge=0)
    """Processors that Ray sets aside for each. 0 always finds a place: agents mostly wait for the model."""
    grace_s: float = Field(default=2.0, ge=0)
    """How long a late or cancelled agent may clean up before it is broken off."""
    start_s: float = Field(default=60.0, gt=0)
    """Longest time in which a worker must have started and imported the agent."""
    sandbox: SandboxWish = "auto"
    """For the programs of `agent.command`: `bubblewrap`, `user`, `off`, or `auto`, the first that a worker's machine allows."""


class RayExecutor(Executor):
    """One agent, loaded in every worker; jobs go to whichever worker has room."""

    section = RaySection
    runs_elsewhere = True

    def __init__(self, context: ExecutorContext) -> None:
        agent = context.agent
        self._context = context
        self._section: RaySection = context.section or RaySection()
        self._agent_spec = portable_agent_spec(agent)
        self._workflow_slots = make_slots(agent.workflow_config and agent.workflow_config.concurrency)
        self._grader_slots = make_slots(agent.grader_config and agent.grader_config.concurrency)
        self._stack = ExitStack()
        is_program = starts_programs(context)
        hidden, entry = tuple(str(path.resolve()) for path in context.hidden), str(agent.entry.resolve())
        self._sandbox = JobSandbox(name="namespaces", hidden=hidden, readonly=(entry,)) if is_program else None
        self._several_nodes = False
        self._started = itertools.count()
        self._urls: dict[str, str] = {}
        section = self._section
        self._manager = AgentFlowManager(
            self._start_worker,
            workers=section.workers,
            concurrency=section.concurrency,
            start_s=section.start_s,
            events=context.events,
        )

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(open_cluster(self._section.address, namespace=NAMESPACE))
            self._several_nodes = len(live_nodes()) > 1
            await self._manager.open()
            if self._sandbox is None:
                announce_trusted(self._context, "ray")
            for notice in sorted({worker.notice for worker in self._manager.locations if worker.notice}):
                self._context.events.emit("notice", text=notice)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            await self._manager.close()

    async def run(self, task: Task, session: GatewaySession, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        spec = SessionSpec.of(session, self._context.agent)
        spec = replace(spec, base_url=await self._url(spec.base_url))
        async with self._workflow_slots:
            task = replace(task, label=None)  # it does not even get where the agent is
            answer = await self._done(self._job("workflow", task, rollout_id, timeout_s, spec), {})
        return WorkflowResult(answer.samples, answer.direct_calls, answer.returned)

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        async with self._grader_slots:
            answer = await self._done(self._job("grader", task, rollout_id, timeout_s, None), samples)
        return answer.rewards

    async def _url(self, base_url: str) -> str:
        """The gateway as workers see it."""
        if base_url not in self._urls:
            self._urls[base_url] = await reachable_url(base_url, several_nodes=self._several_nodes)
        return self._urls[base_url]

    def _start_worker(self) -> Any:
        options = {"num_cpus": self._section.cpus, "scheduling_strategy": self._where(), "max_restarts": 0}
        arguments: dict[str, Any] = {"grace_s": self._section.grace_s}
        if self._sandbox is not None:
            arguments |= {"sandbox": self._section.sandbox, "hidden": self._sandbox.hidden}
        return ray.remote(AgentFlowWorker).options(**options).remote(self._agent_spec, **arguments)

    def _where(self) -> Any:
        """The node of the next worker. On the only one they stay, also if others join: the gateway may be on its loopback."""
        if not self._several_nodes:
            return on_node(own_node_id())
        if self._section.cpus:
            return "SPREAD"
        nodes = sorted(node["NodeID"] for node in live_nodes())  # Ray does not spread what asks for no processor
        return on_node(nodes[next(self._started) % len(nodes)])

    def _job(self, kind: JobKind, task: Task, rollout_id: str, timeout_s: float, session: SessionSpec | None) -> AgentJob:
        folder = self._context.artifacts and self._context.artifacts.resolve() / rollout_id
        return AgentJob(
            kind=kind,
            task=task,
            session=session,
            timeout_s=timeout_s,
            grace_s=self._section.grace_s,
            memory_mb=None,
            artifacts_dir=str(folder) if folder else None,
            log=None,
            sandbox=self._sandbox if kind == "workflow" else None,
        )

    async def _done(self, job: AgentJob, samples: Mapping[str, RolloutSample]) -> JobResult:
        try:
            frame = to_json(job)
        except ValueError as cause:
            raise self._unsent(job, cause) from cause
        grace_s = job.grace_s
        answer = await self._manager.run(frame, write_samples(samples), timeout_s=job.timeout_s + grace_s, grace_s=grace_s)
        if error := answer.error():
            raise error
        return answer

    def _unsent(self, job: AgentJob, cause: ValueError) -> WorkflowError | GraderError:
        agent, text = self._context.agent, f"task {job.task.id!r} cannot be sent to a Ray worker: {cause}"
        if job.kind == "workflow":
            return WorkflowError(f"workflow {agent.workflow.__name__!r}: {text}")
        return GraderError(f"grader {agent.grader_name!r}: {text}")
