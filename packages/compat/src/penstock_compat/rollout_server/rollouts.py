"""All rollouts of one server: accepts each once and up to a limit, cancels, resumes after a restart, drains at the end."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.errors import RequestError, one_line
from penstock.rollout.author_tasks import Slots
from penstock.sdk.clients import Clients
from penstock_compat.rollout_server.backend import ExecutionBackend
from penstock_compat.rollout_server.delivery import CallbackSender, DeliveryPolicy
from penstock_compat.rollout_server.journal import DEFAULT_PATH, MAX_SETTLED, Journal, JournalEntry, JournalStatus, open_journal
from penstock_compat.rollout_server.protocol import RolloutInitRequest, RolloutState
from penstock_compat.rollout_server.rollout_task import STOPPED, RolloutTask, ServerResources

CANCELLED = "cancelled by whoever asked for it"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_accepted: int = 1000
    """Unfinished rollouts; one more is refused with 429."""
    drain_s: float = 30.0
    """How long running rollouts may continue when the server stops."""
    final_delivery_s: float = 5.0
    """How long it then tries to deliver that they were cancelled; what is not delivered stays in the journal."""
    max_settled: int = MAX_SETTLED
    """Finished rollouts that are remembered."""
    delivery: DeliveryPolicy = field(default_factory=DeliveryPolicy)


class AcceptedRollouts:
    """Open from `start` to `close`. The journal is a file; None keeps it in memory."""

    def __init__(
        self, backend: ExecutionBackend, *, journal: Path | None = DEFAULT_PATH, limits: ServerLimits | None = None
    ) -> None:
        self.limits = limits or ServerLimits()
        self.draining = False
        self._backend = backend
        self._journal_path = journal
        self._starting = asyncio.Lock()
        self._resources: ServerResources | None = None
        self._stack = AsyncExitStack()
        self._rollouts: dict[str, RolloutTask] = {}
        """The unfinished ones, by id."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._accepting = 0
        """Requests that are being written to the journal."""

    async def start(self) -> None:
        """Opens the journal and resumes its unfinished rollouts; does nothing if that is done."""
        async with self._starting:
            if self._resources is not None:
                return
            journal = await asyncio.to_thread(open_journal, self._journal_path, max_settled=self.limits.max_settled)
            self._stack.push_async_callback(journal.close)
            clients = Clients()
            self._stack.push_async_callback(clients.close)
            sender = await self._stack.enter_async_context(CallbackSender(self.limits.delivery))
            slots = Slots(self._backend.max_concurrency or None)
            self._resources = ServerResources(backend=self._backend, journal=journal, sender=sender, clients=clients, slots=slots)
            self.draining = False
            for entry in await journal.unsettled():
                self._resume(entry, self._resources)

    async def accept(self, request: RolloutInitRequest) -> None:
        """Accepts a rollout; RequestError if it cannot. A repeated request is accepted without effect."""
        if self.draining:
            raise RequestError("the server is stopping; ask another one, or this one later", status=503, code="stopping")
        known = request.rollout_id in self._rollouts
        if not known and len(self._rollouts) + self._accepting >= self.limits.max_accepted:
            text = f"{self.limits.max_accepted} rollouts are accepted and not over; try again later"
            raise RequestError(text, status=429, code="too_many_rollouts")
        self._accepting += not known
        try:
            body = json.dumps(request.model_dump(), sort_keys=True).encode()
            accepted = await self._open.journal.accept(request.rollout_id, sha256(body).hexdigest(), body)
        finally:
            self._accepting -= not known
        if accepted == "other":
            text = f"rollout {request.rollout_id!r} came before with another body; give each rollout its own id"
            raise RequestError(text, status=409, code="rollout_exists")
        if accepted == "new":
            rollout = RolloutTask(request, self._open)
            self._start(rollout, rollout.run())

    async def status(self, rollout_id: str) -> JournalStatus:
        return await self._open.journal.status(rollout_id)

    async def cancel(self, matches: Callable[[str], bool]) -> list[str]:
        """Cancels the unfinished rollouts that match; returns their ids. Each end is stored and delivered like any other."""
        cancelled: list[str] = []
        for rollout in [rollout for rollout in self._rollouts.values() if matches(rollout.id)]:
            if await rollout.end(RolloutState.CANCELLED, CANCELLED):
                rollout.stop()
                cancelled.append(rollout.id)
        return cancelled

    def health(self) -> dict[str, Any]:
        """Returns the back end's health, with the rollouts that wait for a slot here."""
        health = dict(self._backend.health())
        waiting = self._resources.slots.queued if self._resources else 0
        if isinstance(counts := health.get("concurrency"), dict) and "queued" in counts:
            health["concurrency"] = {**counts, "queued": counts["queued"] + waiting}
        health |= {"accepted": len(self._rollouts), "separate_keys": True}
        return health | ({"status": "stopping"} if self.draining else {})

    async def drain(self) -> None:
        """Accepts nothing more; gives running rollouts `drain_s`, then fails them. Queued ones wait for the next start."""
        if self.draining or self._resources is None:
            return
        self.draining = True
        await self._stop_queued(self._resources.journal)
        await self._wait(self.limits.drain_s)
        for rollout in list(self._rollouts.values()):
            if await rollout.end(RolloutState.FAILURE, STOPPED):
                rollout.stop()
        await self._wait(self.limits.final_delivery_s)

    async def close(self) -> None:
        """Drains and closes everything; results that are not delivered stay in the journal."""
        await self.drain()
        while tasks := set(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await self._stack.aclose()
        self._resources = None

    @property
    def _open(self) -> ServerResources:
        if self._resources is None:
            raise RequestError("the server has not started", status=503, code="stopping")
        return self._resources

    def _resume(self, entry: JournalEntry, resources: ServerResources) -> None:
        try:
            request = RolloutInitRequest.model_validate(json.loads(entry.request or b"{}"))
        except ValueError as error:  # written by another version
            log.error("rollout %s is left as it stands in the journal: %s", entry.id, one_line(error))
            return
        rollout = RolloutTask(request, resources)
        self._start(rollout, rollout.resume())

    def _start(self, rollout: RolloutTask, work: Coroutine[Any, Any, None]) -> None:
        self._rollouts[rollout.id] = rollout
        task = self._tasks[rollout.id] = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._remove(rollout.id, task))

    def _remove(self, rollout_id: str, task: "asyncio.Task[None]") -> None:
        del self._rollouts[rollout_id], self._tasks[rollout_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("rollout %s is left as it stands in the journal: %s", rollout_id, one_line(error))

    async def _stop_queued(self, journal: Journal) -> None:
        """Cancels queued rollouts. They stay in a durable journal; otherwise they end here."""
        for rollout_id, rollout in list(self._rollouts.items()):
            if (await journal.status(rollout_id)).state is not RolloutState.QUEUED:
                continue
            if journal.is_durable:
                task = self._tasks[rollout_id]
                task.cancel()
                await asyncio.wait({task})
            elif await rollout.end(RolloutState.FAILURE, STOPPED):
                rollout.stop()

    async def _wait(self, limit_s: float) -> None:
        if tasks := set(self._tasks.values()):
            await asyncio.wait(tasks, timeout=limit_s)
