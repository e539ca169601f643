"""AgentFlowManager: one queue of jobs and the workers that take from it, each the next job as soon as it has room."""

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.errors import ConfigError, WorkerLost
from penstock.events import Events
from penstock.rollout.author_tasks import leaves
from penstock.rollout.processes.job_protocol import Answer
from penstock.scale.actor_calls import MAX_DEATHS, Actor, ActorGone, call_result
from penstock.scale.package import RayError
from penstock.scale.worker import EVENT_NUMBER, WorkerJob, WorkerLocation, kill_worker
from penstock.system.async_tools import settled

LATE_S = 10.0
"""How long after its deadline an answer may come before its worker counts as stuck: something blocks its event loop."""
GONE_S = 1.0
"""For the word that a cancelled job has left, beyond its own grace."""


@dataclass(eq=False)
class _QueuedJob:
    order: WorkerJob
    patience_s: float
    answer: asyncio.Future[Answer]
    worker: "_RayWorker | None" = None
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _RayWorker:
    handle: Actor
    place: WorkerLocation
    jobs: dict[int, _QueuedJob] = field(default_factory=dict[int, _QueuedJob])
    """Given to it and not answered yet."""
    unsent: list[WorkerJob] = field(default_factory=list[WorkerJob])
    stuck: bool = False


class AgentFlowManager:
    """A context manager around `workers` workers that `hire` starts. A dead one is replaced; what it had raises WorkerLost."""

    def __init__(self, hire: Callable[[], Actor], *, workers: int, room: int, start_s: float, events: Events) -> None:
        self._hire, self._count, self._room, self._start_s, self._events = hire, workers, room, start_s, events
        self._queue: deque[_QueuedJob] = deque()
        self._numbers = itertools.count()
        self._workers: set[_RayWorker] = set()
        self._lost_in_a_row = 0
        self._dealing = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def places(self) -> list[WorkerLocation]:
        """Where the living workers are."""
        return [worker.place for worker in self._workers]

    async def open(self) -> None:
        """Start all workers at once; ConfigError where one cannot be started or cannot load the agent."""
        handles = [self._hire() for _ in range(self._count)]
        try:
            async with asyncio.TaskGroup() as group:
                opened = [group.create_task(self._open(handle)) for handle in handles]
        except BaseExceptionGroup as several:
            raise next(leaves(several)) from None
        for worker in opened:
            self._engage(worker.result())

    async def close(self) -> None:
        """End every worker; jobs that still run raise WorkerLost."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for worker in list(self._workers):
            kill_worker(worker.handle)
            self._bury(worker, "was ended with the run")

    async def do(self, job: bytes, samples: bytes, *, patience_s: float, grace_s: float) -> Answer:
        """What came of a job; `patience_s` is how long it may run in a worker. Cancelled, it is first ended where it runs."""
        future = asyncio.get_running_loop().create_future()
        entry = _QueuedJob(WorkerJob(next(self._numbers), job, samples), patience_s, future)
        self._queue.append(entry)
        self._deal_soon()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await settled(self._withdraw(entry, grace_s))
            raise
        finally:
            future.cancel()

    def _deal_soon(self) -> None:
        """Once for all jobs and answers of this turn of the loop, so that they travel together."""
        if not self._dealing:
            self._dealing = True
            asyncio.get_running_loop().call_soon(self._deal)

    def _deal(self) -> None:
        self._dealing = False
        while self._queue and (free := [worker for worker in self._workers if len(worker.jobs) < self._room]):
            worker, job = min(free, key=lambda each: len(each.jobs)), self._queue.popleft()
            if job.answer.done():
                continue
            job.worker, worker.jobs[job.order.number] = worker, job
            job.timer = asyncio.get_running_loop().call_later(job.patience_s + LATE_S, self._overdue, job)
            worker.unsent.append(job.order)
        for worker in self._workers:
            if worker.unsent:
                orders, worker.unsent = worker.unsent, []
                worker.handle.take.remote(orders)  # if it dies of this, `answers` tells
        if not self._workers and not self._tasks:
            self._fail_queued()

    def _overdue(self, job: _QueuedJob) -> None:
        """Its deadline passed in the worker without a word: nothing can run there, so end it.

        Who blocks it cannot be known. The one that was first too late has timed out; the others are made again elsewhere.
        """
        if job.worker is not None and not job.worker.stuck and not job.answer.done():
            job.answer.set_exception(TimeoutError())
            job.worker.stuck = True
            kill_worker(job.worker.handle)

    async def _withdraw(self, job: _QueuedJob, grace_s: float) -> None:
        """End a job whose caller has gone; its worker has `grace_s` for that."""
        if job.worker is None:
            with suppress(ValueError):
                self._queue.remove(job)
            return
        job.worker.handle.cancel.remote(job.order.number)
        await asyncio.wait({job.answer}, timeout=grace_s + GONE_S)

    async def _open(self, handle: Actor) -> _RayWorker:
        try:
            return _RayWorker(handle, await self._place(handle))
        except BaseException:
            kill_worker(handle)
            raise

    async def _place(self, handle: Actor) -> WorkerLocation:
        try:
            async with asyncio.timeout(self._start_s):
                place: WorkerLocation = await call_result(handle.open.remote())
        except TimeoutError:
            raise ConfigError(
                f"a Ray worker did not start within executor.start_s = {self._start_s:g}; raise it, or lower executor.workers or "
                "executor.cpus if the cluster has no room for it (`ray status`)"
            ) from None
        except ActorGone as cause:
            raise ConfigError(f"a Ray worker died while it started: {str(cause).splitlines()[0]}; see Ray's logs") from cause
        if place.problem:
            raise ConfigError(f"a Ray worker on {place.address} cannot load the agent: {place.problem}")
        return place

    def _engage(self, worker: _RayWorker) -> None:
        self._workers.add(worker)
        self._events.emit("worker.start", pid=worker.place.pid, node=worker.place.address)
        self._spawn(worker)
        self._deal_soon()

    def _spawn(self, worker: _RayWorker) -> None:
        task = asyncio.get_running_loop().create_task(self._attend(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, worker: _RayWorker) -> None:
        """Take a worker's answers until it dies; then start another in its place."""
        try:
            while True:
                for number, frame in await call_result(worker.handle.answers.remote()):
                    self._hear(worker, number, frame)
                self._deal_soon()
        except RayError as gone:
            kill_worker(worker.handle)  # one that cannot be reached must not go on with what others will do again
            how = "did not answer in time" if worker.stuck else "died"
            self._bury(worker, how)
            self._events.emit("worker.lost", pid=worker.place.pid, node=worker.place.address, message=str(gone).splitlines()[0])
        await self._replace()

    def _hear(self, worker: _RayWorker, number: int, frame: bytes) -> None:
        if number == EVENT_NUMBER:
            kind, fields = json.loads(frame)
            self._events.emit(kind, **fields)
            return
        self._lost_in_a_row = 0
        job = worker.jobs.pop(number, None)
        if job is None:
            return
        if job.timer is not None:
            job.timer.cancel()
        if not job.answer.done():
            try:
                job.answer.set_result(Answer.read(frame))
            except ValueError as cause:
                job.answer.set_exception(WorkerLost(f"the Ray worker {worker.place.pid} gave an answer that is none: {cause}"))

    def _bury(self, worker: _RayWorker, how: str) -> None:
        self._workers.discard(worker)
        for job in worker.jobs.values():
            if job.timer is not None:
                job.timer.cancel()
            if not job.answer.done():
                where = f"process {worker.place.pid} on {worker.place.address}"
                job.answer.set_exception(WorkerLost(f"the Ray worker that ran it {how} ({where})"))
        worker.jobs.clear()

    async def _replace(self) -> None:
        while self._lost_in_a_row < MAX_DEATHS * self._count:
            self._lost_in_a_row += 1
            try:
                self._engage(await self._open(self._hire()))
                return
            except ConfigError as error:
                self._events.emit("worker.lost", pid=0, node="", message=str(error))
        if not self._workers:
            self._fail_queued()

    def _fail_queued(self) -> None:
        while self._queue:
            job = self._queue.popleft()
            if not job.answer.done():
                job.answer.set_exception(
                    WorkerLost(f"no Ray worker is left: {self._lost_in_a_row} died in a row; see Ray's logs and restart the run")
                )
