"""All rollouts of one server: accepted under a limit, once each, cancelled, taken up after a restart, drained at the end."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.errors import RequestError
from penstock.rollout.author_tasks import Slots, one_line
from penstock.rollout.server.backend import ExecutionBackend
from penstock.rollout.server.delivery import Courier, Patience
from penstock.rollout.server.journal import KEPT, PLACE, Entry, Journal, Standing, open_journal
from penstock.rollout.server.protocol import RolloutInitRequest, State
from penstock.rollout.server.rollout_task import STOPPED, Means, RolloutTask
from penstock.sdk.clients import Clients

CANCELLED = "cancelled by whoever asked for it"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server bears."""

    max_accepted: int = 1000
    """Rollouts that are accepted and not over; one more is refused with 429."""
    drain_s: float = 30.0
    """How long rollouts that run may go on when the server is to stop."""
    last_words_s: float = 5.0
    """How long it then tries to deliver that it broke them off; what is not delivered stays in the journal."""
    kept: int = KEPT
    """Rollouts that are over and still known."""
    patience: Patience = field(default_factory=Patience)


class Rollouts:
    """Open from `start` to `close`. The journal is a file; None keeps it in memory, and nothing survives the process."""

    def __init__(self, backend: ExecutionBackend, *, journal: Path | None = PLACE, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.draining = False
        self._backend = backend
        self._place = journal
        self._starting = asyncio.Lock()
        self._means: Means | None = None
        self._stack = AsyncExitStack()
        self._courses: dict[str, RolloutTask] = {}
        """Those that are not over."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._entering = 0
        """Requests that are being written down."""

    async def start(self) -> None:
        """Open the journal and take up what it holds; does nothing where that is done."""
        async with self._starting:
            if self._means is not None:
                return
            journal = await asyncio.to_thread(open_journal, self._place, kept=self.limits.kept)
            self._stack.push_async_callback(journal.close)
            clients = Clients()
            self._stack.push_async_callback(clients.close)
            courier = await self._stack.enter_async_context(Courier(self.limits.patience))
            slots = Slots(self._backend.max_concurrency or None)
            self._means = Means(backend=self._backend, journal=journal, courier=courier, clients=clients, slots=slots)
            self.draining = False
            for entry in await journal.unsettled():
                self._take_up(entry, self._means)

    async def accept(self, request: RolloutInitRequest) -> None:
        """Promise to run it; RequestError where it cannot be promised. A request that came before is promised already."""
        if self.draining:
            raise RequestError("the server is stopping; ask another one, or this one later", status=503, code="stopping")
        known = request.rollout_id in self._courses
        if not known and len(self._courses) + self._entering >= self.limits.max_accepted:
            text = f"{self.limits.max_accepted} rollouts are accepted and not over; try again later"
            raise RequestError(text, status=429, code="too_many_rollouts")
        self._entering += not known
        try:
            body = json.dumps(request.model_dump(), sort_keys=True).encode()
            found = await self._open.journal.accept(request.rollout_id, sha256(body).hexdigest(), body)
        finally:
            self._entering -= not known
        if found == "other":
            text = f"rollout {request.rollout_id!r} came before with another body; give each rollout an id of its own"
            raise RequestError(text, status=409, code="rollout_exists")
        if found == "new":
            course = RolloutTask(request, self._open)
            self._follow(course, course.run())

    async def standing(self, rollout_id: str) -> Standing:
        """How far it is."""
        return await self._open.journal.find(rollout_id)

    async def cancel(self, wanted: Callable[[str], bool]) -> list[str]:
        """End those that are wanted and have not ended; their ids. Each one's end is on disk and is delivered like any other."""
        ended: list[str] = []
        for course in [course for course in self._courses.values() if wanted(course.id)]:
            if await course.end(State.CANCELLED, CANCELLED):
                course.stop()
                ended.append(course.id)
        return ended

    def health(self) -> dict[str, Any]:
        """What the back end says, with the rollouts that wait here."""
        told = dict(self._backend.health())
        waiting = self._means.slots.queued if self._means else 0
        if isinstance(counts := told.get("concurrency"), dict) and "queued" in counts:
            told["concurrency"] = {**counts, "queued": counts["queued"] + waiting}
        told["accepted"] = len(self._courses)
        return told | ({"status": "stopping"} if self.draining else {})

    async def drain(self) -> None:
        """Accept nothing more; let what runs go on for `drain_s`, then fail it. What waits is left for the next start."""
        if self.draining or self._means is None:
            return
        self.draining = True
        await self._leave_waiting(self._means.journal)
        await self._wait(self.limits.drain_s)
        for course in list(self._courses.values()):
            if await course.end(State.FAILURE, STOPPED):
                course.stop()
        await self._wait(self.limits.last_words_s)

    async def close(self) -> None:
        """Drain, and let go of everything; results that are not delivered stay in the journal."""
        await self.drain()
        while tasks := set(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await self._stack.aclose()
        self._means = None

    @property
    def _open(self) -> Means:
        if self._means is None:
            raise RequestError("the server has not started", status=503, code="stopping")
        return self._means

    def _take_up(self, entry: Entry, means: Means) -> None:
        try:
            request = RolloutInitRequest.model_validate(json.loads(entry.request or b"{}"))
        except ValueError as error:  # another version's
            log.error("rollout %s is left as it stands in the journal: %s", entry.id, one_line(error))
            return
        course = RolloutTask(request, means)
        self._follow(course, course.resume())

    def _follow(self, course: RolloutTask, way: Coroutine[Any, Any, None]) -> None:
        self._courses[course.id] = course
        task = self._tasks[course.id] = asyncio.create_task(way)
        task.add_done_callback(lambda task: self._over(course.id, task))

    def _over(self, rollout_id: str, task: "asyncio.Task[None]") -> None:
        del self._courses[rollout_id], self._tasks[rollout_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("rollout %s is left as it stands in the journal: %s", rollout_id, one_line(error))

    async def _leave_waiting(self, journal: Journal) -> None:
        """Start none of those that wait; where the journal does not last, they end here."""
        for rollout_id, course in list(self._courses.items()):
            if (await journal.find(rollout_id)).state is not State.QUEUED:
                continue
            if journal.lasting:
                task = self._tasks[rollout_id]
                task.cancel()
                await asyncio.wait({task})
            elif await course.end(State.FAILURE, STOPPED):
                course.stop()

    async def _wait(self, limit_s: float) -> None:
        if tasks := set(self._tasks.values()):
            await asyncio.wait(tasks, timeout=limit_s)
