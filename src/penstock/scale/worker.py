"""AgentFlowWorker: an actor that has the agent loaded and runs all the jobs that it is sent at once."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.codec import from_json
from penstock.errors import PenstockError, WorkflowError, one_line
from penstock.events import Events
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import ScratchFolders, artifacts_dir, choose_program_sandbox, sandbox_notice
from penstock.rollout.in_process import InProcessAgent
from penstock.rollout.processes.job_protocol import AgentJob, failure_result, read_samples
from penstock.scale.actor_calls import ItemQueue
from penstock.scale.cluster import own_node
from penstock.scale.package import ray
from penstock.sdk.clients import Clients, preload_clients
from penstock.sdk.discovery import AgentSpec
from penstock.system.processes import protect_memory
from penstock.system.sandbox import Confinement, Sandbox, SandboxWish

EVENT_NUMBER = -1
"""In place of a job's number: the item is an event."""


class WorkerJob(NamedTuple):
    """A job as it is sent to a worker: numbers and JSON only."""

    number: int
    job: bytes
    samples: bytes


class WorkerLocation(NamedTuple):
    """Where a worker runs, why it cannot work, and what its agents can reach."""

    pid: int
    node_id: str
    address: str
    problem: str
    """Empty where the agent was loaded."""
    notice: str = ""
    """See `sandbox_notice`."""


class AgentFlowWorker:
    """One process with one event loop; `take` gives it jobs, `answers` returns their results."""

    def __init__(
        self, agent_spec: bytes, *, grace_s: float, sandbox: SandboxWish | None = None, hidden: Sequence[str] = ()
    ) -> None:
        """`sandbox` is for an agent that is a command; what is `hidden` from it comes with each job too."""
        self._spec, self._grace_s, self._hidden = AgentSpec.read(agent_spec), grace_s, hidden
        self._wish: SandboxWish | None = sandbox
        self._work: InProcessAgent | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._scratch = ScratchFolders()
        self._sandbox = Sandbox(name="off")

    async def open(self) -> WorkerLocation:
        problem = notice = ""
        protect_memory()
        self._done, self._clients, events = ItemQueue(), Clients(), Events()
        events.listen(lambda kind, fields: self._done.put((EVENT_NUMBER, json.dumps([kind, fields], default=str).encode())))
        try:
            agent = self._spec.load()
            await asyncio.to_thread(preload_clients, agent.entry.parent.resolve())  # else the first rollouts' deadlines pay for it
            self._work = InProcessAgent(agent, AuthorTasks(agent.entry.parent, events, grace_s=self._grace_s))
            if self._wish is not None:
                self._sandbox = choose_program_sandbox(agent, self._wish)
                notice = sandbox_notice(self._sandbox, map(Path, self._hidden))
        except PenstockError as error:
            problem = one_line(error)
        node = own_node()
        return WorkerLocation(os.getpid(), node["NodeID"], node["NodeManagerAddress"], problem, notice)

    async def take(self, messages: list[WorkerJob]) -> None:
        for message in messages:
            task = asyncio.create_task(self._perform(*message))
            self._running[message.number] = task
            task.add_done_callback(lambda _, number=message.number: self._running.pop(number, None))

    async def cancel(self, number: int) -> None:
        """Cancel a job; its answer comes once it has ended."""
        if task := self._running.get(number):
            task.cancel()

    async def answers(self) -> list[tuple[int, bytes]]:
        """Returns results of jobs since the last call, by number; waits for the first."""
        return await self._done.take()

    async def _perform(self, number: int, job: bytes, samples: bytes) -> None:
        parsed = from_json(AgentJob, job)
        try:
            result = await self._outcome(parsed, samples)
        except asyncio.CancelledError:
            result = failure_result(WorkflowError("was cancelled"), parsed.kind)
        except Exception as error:  # theirs come named; any other is reported, since nobody would see it here
            result = failure_result(error, parsed.kind)
        self._done.put((number, json.dumps(result, default=str).encode()))

    async def _outcome(self, job: AgentJob, samples: bytes) -> dict[str, Any]:
        assert self._work is not None  # a worker without an agent gets no jobs
        destination = Path(job.artifacts_dir) if job.artifacts_dir else None
        if job.session is None:
            with artifacts_dir(destination and destination.parent, destination.name if destination else "") as folder:
                rewards = self._work.grade(job.task, read_samples(samples), timeout_s=job.timeout_s, artifacts_dir=folder)
                return {"rewards": await rewards}
        context = job.session.context(self._clients, self._confinement(job))
        async with self._scratch.folder_for(destination) as folder:
            result = self._work.run(job.task, context, timeout_s=job.timeout_s, artifacts_dir=folder)
            return (await result)._asdict()

    def _confinement(self, job: AgentJob) -> Confinement | None:
        """The sandbox for the programs of a command; any other agent is trusted with this process."""
        if job.sandbox is None:
            return None
        hidden, readonly = (tuple(map(Path, paths)) for paths in (job.sandbox.hidden, job.sandbox.readonly))
        return Confinement(sandbox=self._sandbox, hidden=(*hidden, self._scratch.root), readonly=readonly)


def kill_worker(handle: Any) -> None:
    """Kill a worker's process, whatever runs in it."""
    ray.kill(handle, no_restart=True)
