"""Trajectories: rollouts that callers name themselves. The first request opens one in the pool; it is completed once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway.auth import GatewayTokens
from penstock.gateway.client_sessions import SESSION_PROMPT
from penstock.gateway.session import (
    COMPLETED_BY_FLOW,
    RESERVED_PREFIX,
    Session,
    Sessions,
    changed_sampling,
    completed_error,
    make_task,
    open_adhoc,
    over_error,
    pool_refusals,
    sampling_of,
)
from penstock.pool.base import AFTER_ALL, Pool
from penstock.records import ADHOC_CHANNEL, Attempt, End, Grade, Rollout, Task

FLOW_SOURCE = "flow"
"""The source of grades that a flow gives."""
DEFAULT_CHANNEL = "train"
_PROMPT = "prompt_uid"
_FLOW = f"{RESERVED_PREFIX}flow"
TRAJECTORY_UID = re.compile(r"(?![mfca]k-)[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
"""Safe in paths, and never mistaken for a token."""
MAX_PROMPT_UID = 1000
"""Characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a caller sets of a trajectory; None if not set."""

    prompt_uid: str | None = None
    channel: str | None = None
    metadata: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] | None = None
    """The fields of `Sampling` that its calls change."""


class Trajectories:
    def __init__(self, pool: Pool, sessions: Sessions, tokens: GatewayTokens) -> None:
        self._pool = pool
        self._sessions = sessions
        self._tokens = tokens

    async def session(self, rollout_id: str, prompt_uid: str | None, *, is_retry: bool = False) -> Session:
        """See `Sessions.get`. With a `prompt_uid`, an unknown rollout is opened."""
        try:
            return await self._sessions.get(rollout_id, is_retry=is_retry)
        except RequestError as error:
            if prompt_uid is None or error.code != "unknown_rollout":
                raise
        channel = ADHOC_CHANNEL if prompt_uid == SESSION_PROMPT else None
        await self.register(rollout_id, Registration(prompt_uid=prompt_uid, channel=channel))
        return await self._sessions.get(rollout_id)

    async def register(self, rollout_id: str, registration: Registration) -> None:
        """Open the trajectory; RequestError 409 if it exists with other values, 410 if it is complete."""
        attempt = await self.find(rollout_id)
        if attempt is None:
            await self._open(rollout_id, registration)
            attempt = await self.get(rollout_id)
        self._refuse_over(attempt)
        task = await self._pool.task(rollout_id)
        if difference := _difference(registration, attempt, task):
            text = f"trajectory {rollout_id} is there with another {difference}; register it before its first call, and once"
            raise RequestError(text, status=409, code="registered_otherwise", param=difference)
        if registration.sampling and _FLOW not in (task.metadata or {}):
            await self._resample(rollout_id, task, registration.sampling)

    async def find(self, rollout_id: str, *, with_steps: bool = False) -> Attempt | None:
        """The attempt, with its steps only if `with_steps`; None if the pool does not know it."""
        first = 0 if with_steps else AFTER_ALL
        try:
            return await self._pool.attempt(rollout_id, first_step=first, first_node=first)
        except PoolFailed:
            raise
        except PoolError:
            return None

    async def get(self, rollout_id: str) -> Attempt:
        """The attempt without its steps; RequestError 404 if the pool does not know it."""
        if (attempt := await self.find(rollout_id)) is None:
            text = f"no trajectory {rollout_id!r} here; begin it with /init_trajectory or its first call"
            raise RequestError(text, status=404, code="unknown_rollout")
        return attempt

    async def complete(self, rollout_id: str, reward: float | None) -> Rollout:
        """Grade it and refuse further calls; RequestError 404 if unknown, 409 or 410 if it has ended."""
        if self._tokens.is_trajectory(rollout_id) and await self.find(rollout_id) is None:
            await self._open(rollout_id, Registration())
        attempt = await self.get(rollout_id)
        self._refuse_over(attempt)
        if reward is not None:
            await self.grade(Grade(rollout_id=rollout_id, reward=reward, source=FLOW_SOURCE))
        await self.finish(rollout_id)
        return attempt.rollout

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

    def _refuse_over(self, attempt: Attempt) -> None:
        if attempt.end is not None:
            raise over_error(attempt)
        if self._sessions.is_complete(attempt.rollout.id):
            raise completed_error(attempt.rollout.id)

    async def _open(self, rollout_id: str, registration: Registration) -> None:
        prompt = registration.prompt_uid or ""
        if not TRAJECTORY_UID.fullmatch(rollout_id):
            text = f"{rollout_id[:60]!r} cannot name a trajectory; use up to 200 letters, digits and . _ : -"
            raise RequestError(text, status=422, code="invalid_value", param="trajectory_uid")
        if len(prompt) > MAX_PROMPT_UID:
            raise RequestError(
                f"prompt_uid is longer than {MAX_PROMPT_UID} characters", status=422, code="invalid_value", param="prompt_uid"
            )
        with pool_refusals(status=409, code="rollout_exists"):
            await open_adhoc(
                self._pool,
                rollout_id=rollout_id,
                task_id=prompt or FLOW_SOURCE,
                channel=registration.channel or DEFAULT_CHANNEL,
                sampling=registration.sampling or {},
                metadata={**(registration.metadata or {}), _PROMPT: prompt, _FLOW: True},
            )

    async def _resample(self, rollout_id: str, task: Task, sampling: Mapping[str, Any]) -> None:
        """Change the sampling of a rollout that its run opened. Kept in this process only, and refused after its first call."""
        session = await self._sessions.get(rollout_id)
        changed = sampling_of(make_task(task.id, sampling), session.sampling)
        if changed != session.sampling and (await session.graph(self._pool)).steps:
            text = f"trajectory {rollout_id} has calls that were sampled otherwise; register its sampling before the first"
            raise RequestError(text, status=409, code="registered_otherwise", param="sampling")
        self._sessions.resample(session, changed)


def _difference(registration: Registration, attempt: Attempt, task: Task) -> str | None:
    """The first field that differs from the existing trajectory; of a rollout that its run opened only the channel is checked."""
    if registration.channel is not None and registration.channel != attempt.rollout.channel:
        return "channel"
    kept = task.metadata or {}
    if _FLOW not in kept:
        return None
    if registration.prompt_uid is not None and registration.prompt_uid != kept[_PROMPT]:
        return _PROMPT
    if registration.metadata is not None and _own_metadata(registration.metadata) != _own_metadata(kept):
        return "metadata"
    return "sampling" if registration.sampling is not None and dict(registration.sampling) != changed_sampling(task) else None


def _own_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller set of it."""
    return {name: value for name, value in metadata.items() if name != _PROMPT and not name.startswith(RESERVED_PREFIX)}
