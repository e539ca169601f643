"""Open rollouts: those that this gateway was given, and those that it took over from the pool."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway.auth import Tokens
from penstock.gateway.call import Limits
from penstock.gateway.session import Session, has_ended, is_gone, over
from penstock.gateway.shared_counters import Peers
from penstock.pool.base import Pool
from penstock.records import Attempt, Rollout, Sampling, Task, make_rollout


class Sessions:
    """The rollouts that this gateway serves. One that nobody opened here is taken over from the pool.

    `defaults` are by channel, "" for the others; `peers` are the other workers.
    """

    def __init__(
        self,
        pool: Pool,
        tokens: Tokens,
        *,
        defaults: Mapping[str, Sampling],
        limits: Limits,
        base_url: str,
        peers: Peers,
    ) -> None:
        self.base_url = base_url
        self._pool = pool
        self._tokens = tokens
        self._defaults = defaults
        self._limits = limits
        self._peers = peers
        self._open: dict[str, Session] = {}
        self._taken = OrderedDict[str, Session]()
        """The one that called last comes last."""
        self._closed = OrderedDict[str, bool]()
        """Whether it was its flow that completed it."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._open) + len(self._taken)

    def open(self, rollout: Rollout, sampling: Sampling, *, fresh: bool = False) -> Session:
        """Let the rollout call the model; of a `fresh` one nothing is stored yet, so the pool is not asked."""
        session = self._open[rollout.id] = self._make(rollout, sampling, stored=Attempt(rollout=rollout) if fresh else None)
        self._closed.pop(rollout.id, None)
        self._taken.pop(rollout.id, None)
        return session

    def runs(self, rollout_id: str) -> bool:
        """Whether a runner in this process has it open, and will end it."""
        return rollout_id in self._open

    @property
    def stopping(self) -> bool:
        """Whether no more calls are taken."""
        return self._stopping

    def graded(self, rollout_id: str) -> None:
        """A grade of it comes by a route, and goes to the pool alone."""
        session = self._open.get(rollout_id) or self._taken.get(rollout_id)
        if session is not None:
            session.partial = True

    def is_complete(self, rollout_id: str) -> bool:
        """Whether it is known here that its flow has completed it."""
        return self._closed.get(rollout_id, False)

    def close(self, rollout_id: str, *, complete: bool = False) -> Attempt | None:
        """Refuse its calls from now on and cancel those that run; an unknown rollout is nothing to close.

        What it recorded, where that is known here and nothing runs that could add to it.
        """
        complete = complete or self.is_complete(rollout_id)
        session = self._open.pop(rollout_id, None) or self._taken.pop(rollout_id, None)
        while len(self._closed) >= REMEMBERED:
            self._closed.popitem(last=False)
        self._closed[rollout_id] = complete
        self._peers.tell(rollout_id)
        if session is None:
            return None
        session.close()
        return None if session.tasks else session.recorded()

    async def drain(self, within_s: float) -> None:
        """Take no more calls and wait for those that run, but not longer than that."""
        self._stopping = True
        running = {task for session in [*self._open.values(), *self._taken.values()] for task in session.tasks}
        if running:
            await asyncio.wait(running, timeout=within_s)

    def close_all(self) -> None:
        """Refuse all calls and cancel those that run."""
        for rollout_id in [*self._open, *self._taken]:
            self.close(rollout_id)

    async def get(self, rollout_id: str, *, again: bool = False) -> Session:
        """The rollout's session; RequestError 409 where it has ended, 404 where the pool does not know it, 503 when we stop.

        `again` is for a call that may have been made before, at another worker.
        """
        if self._stopping:
            raise RequestError("the gateway is stopping; try again at the next one", status=503, code="stopping")
        if (complete := self._closed.get(rollout_id)) is not None:
            raise is_gone(rollout_id) if complete else has_ended(rollout_id)
        session = self._open.get(rollout_id)
        if session is None and (session := self._taken.get(rollout_id)) is not None:
            self._taken.move_to_end(rollout_id)
        if session is None:
            session = await self._take_over(rollout_id)
        elif session.shared:
            await self._hear(session, again)
        if again:
            session.tell()  # what a worker stored and did not come to tell is about to be answered from here
        return session

    async def _hear(self, session: Session, again: bool) -> None:
        try:
            await session.hear(self._pool, again=again)
        except RequestError as error:
            self.close(session.rollout_id, complete=error.status == 410)
            raise

    async def _take_over(self, rollout_id: str) -> Session:
        heard = self._peers.look(rollout_id)
        try:
            attempt = await self._pool.attempt(rollout_id)
            task = await self._pool.task(rollout_id)
        except PoolFailed:
            raise
        except PoolError as error:
            raise RequestError(str(error), status=404, code="unknown_rollout") from error
        if attempt.end is not None:
            raise over(attempt)
        default = self._defaults.get(attempt.rollout.channel) or self._defaults.get("") or Sampling()
        taken = self._make(attempt.rollout, sampling_of(task, default), stored=attempt, heard=heard)
        session = self._taken.setdefault(rollout_id, taken)
        self._make_room()
        if session is not taken and session.shared:  # another call was faster, and may have asked the pool before us
            await self._hear(session, again=False)
        return session

    def _make_room(self) -> None:
        """Where there are too many, forget those that called longest ago; one that runs calls has its turn again later."""
        for _ in range(min(2, len(self._taken) - TAKEN)):
            rollout_id, oldest = self._taken.popitem(last=False)
            if oldest.tasks:
                self._taken[rollout_id] = oldest

    def _make(
        self, rollout: Rollout, sampling: Sampling, *, stored: Attempt | None, heard: tuple[int, ...] | None = None
    ) -> Session:
        return Session(
            rollout,
            sampling,
            tokens=self._tokens,
            base_url=self.base_url,
            limits=self._limits,
            peers=self._peers,
            stored=stored,
            heard=heard,
        )


REMEMBERED = 100_000
"""How many closed rollouts are known by heart; the pool knows the others."""
TAKEN = 10_000
"""How many rollouts of other processes are kept; an idle one is read again when it calls."""


ADHOC_CHANNEL = "adhoc"
OURS = "penstock."
"""What the names of our own entries in a task's metadata begin with."""
_SAMPLING = f"{OURS}sampling"


def make_task(task_id: str, sampling: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Task:
    """A task that nobody wrote a prompt for; `sampling` are the fields of `Sampling` that its rollouts change."""
    kept = dict(metadata or {}) | ({_SAMPLING: dict(sampling)} if sampling else {})
    return Task(id=task_id, prompt=(), metadata=kept or None)


def sampling_of(task: Task, default: Sampling) -> Sampling:
    """How calls of the task's rollouts are sampled where they do not say otherwise, whichever process serves them."""
    return replace(default, **changed_sampling(task))


def changed_sampling(task: Task) -> dict[str, Any]:
    """The fields of `Sampling` that the task's rollouts change."""
    return (task.metadata or {}).get(_SAMPLING, {})


async def open_adhoc(
    pool: Pool,
    *,
    rollout_id: str = "",
    group_id: str = "",
    task_id: str = ADHOC_CHANNEL,
    channel: str = ADHOC_CHANNEL,
    sampling: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
) -> Rollout:
    """Make a rollout, unless one of that id is there; PoolError where the id belongs to another group."""
    group_id = group_id or rollout_id or f"{channel}-{secrets.token_hex(4)}"
    rollout = make_rollout(group_id, task_id, 0, channel=channel)
    rollout = replace(rollout, id=rollout_id or rollout.id)
    await pool.open_group(make_task(task_id, sampling, metadata), [rollout], seq=None)
    return rollout
