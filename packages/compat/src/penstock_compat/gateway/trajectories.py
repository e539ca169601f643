"""Trajectories: rollouts that callers name themselves. The first request opens one in the pool; it is completed once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway.auth import GatewayTokens
from penstock.gateway.session import (
    COMPLETED_BY_FLOW,
    DEFAULT_CHANNEL,
    NAMED_KEY,
    PROMPT_KEY,
    RESERVED_PREFIX,
    NamedRollouts,
    Sessions,
    changed_sampling,
    completed_error,
    make_task,
    over_error,
    pool_refusals,
    sampling_of,
)
from penstock.pool.base import AFTER_ALL, Pool
from penstock.records import End, Grade, Rollout, RolloutRef, Task

FLOW_SOURCE = "flow"
"""The source of grades that a flow gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a caller sets of a trajectory; None if not set."""

    prompt_uid: str | None = None
    channel: str | None = None
    metadata: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] | None = None
    """The fields of `Sampling` that its calls change."""


class Trajectories:
    def __init__(self, pool: Pool, sessions: Sessions, named: NamedRollouts, tokens: GatewayTokens) -> None:
        self._pool = pool
        self._sessions = sessions
        self._named = named
        self._tokens = tokens

    async def register(self, rollout_id: str, registration: Registration) -> None:
        """Open the trajectory; RequestError 409 if it exists with other values, 410 if it is complete."""
        rollout = await self.find(rollout_id)
        if rollout is None:
            await self._open(rollout_id, registration)
            rollout = await self.get(rollout_id)
        self._refuse_over(rollout)
        task = await self._pool.task(rollout_id)
        if difference := _difference(registration, rollout, task):
            text = f"trajectory {rollout_id} is there with another {difference}; register it before its first call, and once"
            raise RequestError(text, status=409, code="registered_otherwise", param=difference)
        if registration.sampling and NAMED_KEY not in (task.metadata or {}):
            await self._resample(rollout_id, task, registration.sampling)

    async def find(self, rollout_id: str, *, with_steps: bool = False) -> Rollout | None:
        """The rollout, with its steps only if `with_steps`; None if the pool does not know it."""
        first = 0 if with_steps else AFTER_ALL
        try:
            return await self._pool.rollout(rollout_id, first_step=first, first_node=first)
        except PoolFailed:
            raise
        except PoolError:
            return None

    async def get(self, rollout_id: str) -> Rollout:
        """The rollout without its steps; RequestError 404 if the pool does not know it."""
        if (rollout := await self.find(rollout_id)) is None:
            text = f"no trajectory {rollout_id!r} here; begin it with /init_trajectory or its first call"
            raise RequestError(text, status=404, code="unknown_rollout")
        return rollout

    async def complete(self, rollout_id: str, reward: float | None) -> RolloutRef:
        """Grade it and refuse further calls; RequestError 404 if unknown, 409 or 410 if it has ended."""
        if self._tokens.is_signed_id(rollout_id) and await self.find(rollout_id) is None:
            await self._open(rollout_id, Registration())
        rollout = await self.get(rollout_id)
        self._refuse_over(rollout)
        if reward is not None:
            await self.grade(Grade(rollout_id=rollout_id, reward=reward, source=FLOW_SOURCE))
        await self.finish(rollout_id)
        return rollout.ref

    async def grade(self, grade: Grade) -> None:
        """Store a grade; RequestError 409 if there is another one, or the rollout has ended."""
        self._sessions.note_grade(grade.rollout_id)
        with pool_refusals(status=409, code="not_graded"):
            await self._pool.grade(grade)

    async def finish(self, rollout_id: str) -> None:
        """Refuse further calls, and end the rollout, unless a runner in this process will."""
        if not self._sessions.is_open_here(rollout_id):
            await self._pool.end(rollout_id, End.COMPLETED, COMPLETED_BY_FLOW)
        self._sessions.close(rollout_id, complete=True)

    def _refuse_over(self, rollout: Rollout) -> None:
        if rollout.end is not None:
            raise over_error(rollout)
        if self._sessions.is_complete(rollout.ref.id):
            raise completed_error(rollout.ref.id)

    async def _open(self, rollout_id: str, registration: Registration) -> None:
        await self._named.open(
            rollout_id,
            registration.prompt_uid or "",
            channel=registration.channel or DEFAULT_CHANNEL,
            sampling=registration.sampling,
            metadata=registration.metadata,
        )

    async def _resample(self, rollout_id: str, task: Task, sampling: Mapping[str, Any]) -> None:
        """Change the sampling of a rollout that its run opened. Kept in this process only, and refused after its first call."""
        session = await self._sessions.get(rollout_id)
        changed = sampling_of(make_task(task.id, sampling), session.sampling)
        if changed != session.sampling and (await session.graph(self._pool)).steps:
            text = f"trajectory {rollout_id} has calls that were sampled otherwise; register its sampling before the first"
            raise RequestError(text, status=409, code="registered_otherwise", param="sampling")
        self._sessions.resample(session, changed)


def _difference(registration: Registration, rollout: Rollout, task: Task) -> str | None:
    """The first field that differs from the existing trajectory; of a rollout that its run opened only the channel is checked."""
    if registration.channel is not None and registration.channel != rollout.ref.channel:
        return "channel"
    kept = task.metadata or {}
    if NAMED_KEY not in kept:
        return None
    if registration.prompt_uid is not None and registration.prompt_uid != kept[PROMPT_KEY]:
        return PROMPT_KEY
    if registration.metadata is not None and _own_metadata(registration.metadata) != _own_metadata(kept):
        return "metadata"
    return "sampling" if registration.sampling is not None and dict(registration.sampling) != changed_sampling(task) else None


def _own_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller set of it."""
    return {name: value for name, value in metadata.items() if name != PROMPT_KEY and not name.startswith(RESERVED_PREFIX)}
