"""Runs workflows in a thread of our process: the least overhead, for agents that are trusted like the run itself."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.config import Section
from penstock.records import Task
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import (
    Executor,
    ExecutorContext,
    GatewaySession,
    SessionSpec,
    announce_trusted,
    confine_programs,
    starts_programs,
)
from penstock.rollout.in_process import InProcessAgent, Reward, WorkflowResult
from penstock.sdk.clients import Clients
from penstock.sdk.samples import RolloutSample
from penstock.system.sandbox import Confinement, SandboxWish


class InlineSection(Section):
    """`[executor]` for `rollout.executor = "inline"`."""

    sandbox: SandboxWish = "auto"
    """For the programs of `agent.command`: `bubblewrap`, `user`, `off`, or `auto`, the first that the machine allows."""


class InlineExecutor(Executor):
    """Runs many rollouts at once. Their `ctx.openai()` and `ctx.anthropic()` call the gateway without a socket."""

    section = InlineSection

    def __init__(self, context: ExecutorContext) -> None:
        self._context = context
        self._settings: InlineSection = context.section or InlineSection()
        home = context.agent.entry.parent
        own = AuthorTasks(home, context.events, in_thread=False) if starts_programs(context) else None
        self._agent = InProcessAgent(context.agent, context.author_tasks, workflow_tasks=own)
        self._clients = Clients(context.app)
        self._confinement: Confinement | None = None

    async def __aenter__(self) -> Self:
        if starts_programs(self._context):
            self._confinement = confine_programs(self._context, self._settings.sandbox)
        else:
            announce_trusted(self._context)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._clients.close()
        self._context.author_tasks.close()

    async def run(self, task: Task, session: GatewaySession, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        context = SessionSpec.of(session, self._context.agent).context(self._clients, self._confinement)
        async with self._context.workflow_dir(rollout_id) as folder:
            return await self._agent.run(task, context, timeout_s=timeout_s, artifacts_dir=folder)

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        return await self._agent.grade(task, samples, timeout_s=timeout_s, artifacts_dir=self._artifacts_dir(rollout_id))

    def _artifacts_dir(self, rollout_id: str) -> Path | None:
        # Not made here: the author's context makes it when it is read, and few agents read it. With thousands of rollouts
        # in one event loop, a mkdir for each would be felt.
        return self._context.artifacts and self._context.artifacts / rollout_id
