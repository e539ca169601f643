"""AgentFlowWorker: an actor that has the agent loaded and runs as many of its rollouts at once as it is given."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from penstock.codec import from_json
from penstock.errors import PenstockError, WorkflowError
from penstock.events import Events
from penstock.rollout.author_tasks import AuthorTasks, one_line
from penstock.rollout.execution import Work
from penstock.rollout.executors.base import artifacts_dir
from penstock.rollout.processes.job_protocol import Job, failed, read_samples
from penstock.rollout.processes.preload import warm
from penstock.scale.actor_calls import ItemQueue
from penstock.scale.cluster import own_node
from penstock.scale.package import ray
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.clients import Clients

EVENT_NUMBER = -1
"""In place of a job's number: the item is an event."""


class WorkerJob(NamedTuple):
    """A job on its way to a worker: nothing but numbers and JSON."""

    number: int
    job: bytes
    samples: bytes


class WorkerLocation(NamedTuple):
    """Where a worker is, and why it cannot work."""

    pid: int
    node_id: str
    address: str
    problem: str
    """Empty where the agent was loaded."""


class AgentFlowWorker:
    """One process with one event loop. It is told jobs, and asked for what came of them."""

    def __init__(self, recipe: bytes, *, grace_s: float) -> None:
        self._recipe, self._grace_s = AgentSpec.read(recipe), grace_s
        self._work: Work | None = None
        self._running: dict[int, asyncio.Task[None]] = {}

    async def open(self) -> WorkerLocation:
        problem = ""
        self._done, self._clients, events = ItemQueue(), Clients(), Events()
        events.listen(lambda kind, fields: self._done.put((EVENT_NUMBER, json.dumps([kind, fields], default=str).encode())))
        try:
            agent = self._recipe.load()
            await asyncio.to_thread(warm, agent.entry.parent.resolve())  # else the first rollouts' deadlines pay for it
            self._work = Work(agent, AuthorTasks(agent.entry.parent, events, grace_s=self._grace_s))
        except PenstockError as error:
            problem = one_line(error)
        node = own_node()
        return WorkerLocation(os.getpid(), node["NodeID"], node["NodeManagerAddress"], problem)

    async def take(self, orders: list[WorkerJob]) -> None:
        for order in orders:
            task = asyncio.create_task(self._perform(*order))
            self._running[order[0]] = task
            task.add_done_callback(lambda _, number=order[0]: self._running.pop(number, None))

    async def cancel(self, number: int) -> None:
        """Ask a job to leave; its answer comes when it has."""
        if task := self._running.get(number):
            task.cancel()

    async def answers(self) -> list[tuple[int, bytes]]:
        """What came of jobs since the last call, by their numbers; waits for the first."""
        return await self._done.take()

    async def _perform(self, number: int, job: bytes, samples: bytes) -> None:
        order = from_json(Job, job)
        try:
            told = await self._outcome(order, samples)
        except asyncio.CancelledError:
            told = failed(WorkflowError("was cancelled"), order.kind)
        except Exception as error:  # theirs come named; any other is told, since nobody would see it here
            told = failed(error, order.kind)
        self._done.put((number, json.dumps(told, default=str).encode()))

    async def _outcome(self, job: Job, samples: bytes) -> dict[str, Any]:
        assert self._work is not None  # a worker without an agent gets no jobs
        root, rollout_id = (Path(job.artifacts_dir).parent, Path(job.artifacts_dir).name) if job.artifacts_dir else (None, "")
        with artifacts_dir(root, rollout_id) as folder:
            if job.seat is None:
                rewards = self._work.grade(job.task, read_samples(samples), timeout_s=job.timeout_s, artifacts_dir=folder)
                return {"rewards": await rewards}
            context = job.seat.context(self._clients)
            told = self._work.run(job.task, context, timeout_s=job.timeout_s, artifacts_dir=folder)
            return (await told)._asdict()


def kill_worker(handle: Any) -> None:
    """End a worker's process now, whatever runs in it."""
    ray.kill(handle, no_restart=True)
