"""Runs workflows in our own event loop: the least overhead, for agents that await what they wait for."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.records import Task
from penstock.rollout.execution import Reward, Work, WorkflowResult
from penstock.rollout.executors.base import Given, Seat, Session
from penstock.sdk.clients import Clients
from penstock.sdk.samples import RolloutSample


class InlineExecutor:
    """One workflow class, many rollouts at once, all on one pool of connections to the gateway."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._work = Work(given.agent, given.guests)
        self._clients = Clients()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._clients.close()

    async def run(self, task: Task, session: Session, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        context = Seat.of(session, self._given.agent).context(self._clients)
        return await self._work.run(task, context, timeout_s=timeout_s, artifacts_dir=self._folder(rollout_id))

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        return await self._work.grade(task, samples, timeout_s=timeout_s, artifacts_dir=self._folder(rollout_id))

    def _folder(self, rollout_id: str) -> Path | None:
        """Made when it is read, as few agents do: in a crowd of rollouts every look at the disk counts."""
        return self._given.artifacts and self._given.artifacts / rollout_id
