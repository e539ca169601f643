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
from penstock.rollout.processes.job_protocol import JobResult
from penstock.scale.actor_calls import MAX_DEATHS, Actor, ActorGone, call_result
from penstock.scale.package import RayError
from penstock.scale.worker import EVENT_NUMBER, WorkerJob, WorkerLocation, kill_worker
from penstock.system.async_tools import finish_shielded, leaf_errors

LATE_S = 10.0
"""How long an answer may be overdue before its worker counts as stuck: something blocks its event loop."""
GONE_S = 1.0
"""For the answer of a cancelled job, beyond its own grace."""


@dataclass(eq=False)
class _QueuedJob:
    message: WorkerJob
    timeout_s: float
    answer: asyncio.Future[JobResult]
    worker: "_RayWorker | None" = None
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _RayWorker:
    handle: Actor
    location: WorkerLocation
    jobs: dict[int, _QueuedJob] = field(default_factory=dict[int, _QueuedJob])
    """Sent or about to be sent, and not answered yet."""
    unsent: list[WorkerJob] = field(default_factory=list[WorkerJob])
    stuck: bool = False


class AgentFlowManager:
    """Keeps `workers` workers, which `start_worker` starts. A dead one is replaced; its jobs raise WorkerLost."""

    def __init__(
        self, start_worker: Callable[[], Actor], *, workers: int, concurrency: int, start_s: float, events: Events
    ) -> None:
        self._start_worker, self._count, self._concurrency, self._start_s, self._events = (
            start_worker,
            workers,
            concurrency,
            start_s,
            events,
        )
        self._queue: deque[_QueuedJob] = deque()
        self._numbers = itertools.count()
        self._workers: set[_RayWorker] = set()
        self._lost_in_a_row = 0
        self._dispatching = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def locations(self) -> list[WorkerLocation]:
        """The locations of the living workers."""
        return [worker.location for worker in self._workers]

    async def open(self) -> None:
        """Start all workers at once; ConfigError where one cannot be started or cannot load the agent."""
        handles = [self._start_worker() for _ in range(self._count)]
        try:
            async with asyncio.TaskGroup() as group:
                opened = [group.create_task(self._open(handle)) for handle in handles]
        except BaseExceptionGroup as several:
            raise next(leaf_errors(several)) from None
        for worker in opened:
            self._add_worker(worker.result())

    async def close(self) -> None:
        """End every worker; jobs that still run raise WorkerLost."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for worker in list(self._workers):
            kill_worker(worker.handle)
            self._fail_jobs(worker, "was ended with the run")

    async def run(self, job: bytes, samples: bytes, *, timeout_s: float, grace_s: float) -> JobResult:
        """Returns the answer to a job, which may run for `timeout_s` in a worker. If cancelled, it is first ended there."""
        future = asyncio.get_running_loop().create_future()
        entry = _QueuedJob(WorkerJob(next(self._numbers), job, samples), timeout_s, future)
        self._queue.append(entry)
        self._dispatch_soon()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await finish_shielded(self._withdraw(entry, grace_s))
            raise
        finally:
            future.cancel()

    def _dispatch_soon(self) -> None:
        """Dispatch once for all jobs of this turn of the event loop, so that they go in one call."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        while self._queue and (free := [worker for worker in self._workers if len(worker.jobs) < self._concurrency]):
            worker, job = min(free, key=lambda each: len(each.jobs)), self._queue.popleft()
            if job.answer.done():
                continue
            job.worker, worker.jobs[job.message.number] = worker, job
            job.timer = asyncio.get_running_loop().call_later(job.timeout_s + LATE_S, self._overdue, job)
            worker.unsent.append(job.message)
        for worker in self._workers:
            if worker.unsent:
                messages, worker.unsent = worker.unsent, []
                worker.handle.take.remote(messages)  # if the worker dies of this, `answers` raises
        if not self._workers and not self._tasks:
            self._fail_queued()

    def _overdue(self, job: _QueuedJob) -> None:
        """The deadline passed in the worker without an answer: nothing can run there, so kill it.

        Which job blocks it is unknown. The first that was late times out; the others are made again elsewhere.
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
        job.worker.handle.cancel.remote(job.message.number)
        await asyncio.wait({job.answer}, timeout=grace_s + GONE_S)

    async def _open(self, handle: Actor) -> _RayWorker:
        try:
            return _RayWorker(handle, await self._locate(handle))
        except BaseException:
            kill_worker(handle)
            raise

    async def _locate(self, handle: Actor) -> WorkerLocation:
        try:
            async with asyncio.timeout(self._start_s):
                location: WorkerLocation = await call_result(handle.open.remote())
        except TimeoutError:
            raise ConfigError(
                f"a Ray worker did not start within executor.start_s = {self._start_s:g}; raise it, or lower executor.workers or "
                "executor.cpus if the cluster has no room for it (`ray status`)"
            ) from None
        except ActorGone as cause:
            raise ConfigError(f"a Ray worker died while it started: {str(cause).splitlines()[0]}; see Ray's logs") from cause
        if location.problem:
            raise ConfigError(f"a Ray worker on {location.address} cannot load the agent: {location.problem}")
        return location

    def _add_worker(self, worker: _RayWorker) -> None:
        self._workers.add(worker)
        self._events.emit("worker.start", pid=worker.location.pid, node=worker.location.address)
        self._spawn(worker)
        self._dispatch_soon()

    def _spawn(self, worker: _RayWorker) -> None:
        task = asyncio.get_running_loop().create_task(self._read_answers(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_answers(self, worker: _RayWorker) -> None:
        """Read a worker's answers until it dies; then start another one."""
        try:
            while True:
                for number, frame in await call_result(worker.handle.answers.remote()):
                    self._receive(worker, number, frame)
                self._dispatch_soon()
        except RayError as gone:
            kill_worker(worker.handle)  # one that is only unreachable must not continue jobs that others will run again
            how = "did not answer in time" if worker.stuck else "died"
            self._fail_jobs(worker, how)
            self._events.emit(
                "worker.lost", pid=worker.location.pid, node=worker.location.address, message=str(gone).splitlines()[0]
            )
        await self._replace()

    def _receive(self, worker: _RayWorker, number: int, frame: bytes) -> None:
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
                job.answer.set_result(JobResult.read(frame))
            except ValueError as cause:
                job.answer.set_exception(WorkerLost(f"the Ray worker {worker.location.pid} gave an answer that is none: {cause}"))

    def _fail_jobs(self, worker: _RayWorker, how: str) -> None:
        self._workers.discard(worker)
        for job in worker.jobs.values():
            if job.timer is not None:
                job.timer.cancel()
            if not job.answer.done():
                where = f"process {worker.location.pid} on {worker.location.address}"
                job.answer.set_exception(WorkerLost(f"the Ray worker that ran it {how} ({where})"))
        worker.jobs.clear()

    async def _replace(self) -> None:
        while self._lost_in_a_row < MAX_DEATHS * self._count:
            self._lost_in_a_row += 1
            try:
                self._add_worker(await self._open(self._start_worker()))
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
