"""Runs workflows in our own event loop: the least overhead, for agents that await what they wait for."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from types import TracebackType
from typing import Any, Self

from penstock.errors import WorkflowError
from penstock.records import Task
from penstock.rollout.executors.base import Session
from penstock.rollout.guests import Guests, slots
from penstock.sdk.context import AgentWorkflowContext, RolloutContext
from penstock.sdk.discovery import Agent


class InlineExecutor:
    """One workflow class, many rollouts at once, all on one pool of connections to the gateway."""

    def __init__(self, agent: Agent, guests: Guests) -> None:
        self._agent = agent
        self._guests = guests
        self._slots = slots(agent.workflow_config and agent.workflow_config.concurrency)
        self._open = AsyncExitStack()
        self._client: Any = None

    async def __aenter__(self) -> Self:
        self._client = await self._open.enter_async_context(_shared_client())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client = None
        await self._open.aclose()

    async def run(self, task: Task, session: Session, *, rollout_id: str, timeout_s: float) -> None:
        """See `Executor.run`."""
        where = RolloutContext(base_url=session.base_url, api_key=session.token, rollout_id=rollout_id, client=self._client)
        what = f"workflow {self._agent.workflow.__name__!r}"
        async with self._slots:
            with where:
                await self._guests.run(self._work(task), error=WorkflowError, what=what, timeout_s=timeout_s)

    async def _work(self, task: Task) -> None:
        config = deepcopy(self._agent.workflow_config)
        context = AgentWorkflowContext(prompt=deepcopy(list(task.prompt)), config=config, metadata=deepcopy(task.metadata))
        await self._agent.workflow(config).run(context)


@asynccontextmanager
async def _shared_client() -> AsyncGenerator[Any, None]:
    """The client whose connections all rollouts share; None without the `openai` package, which not every agent needs.

    The gateway is in this process, so proxies from the environment are left out; the key is never used.
    """
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError:
        yield None
        return

    class Connections(DefaultAsyncHttpxClient):
        """Stays open when a workflow closes its client, as it may: its neighbours are still calling."""

        async def aclose(self) -> None:
            pass

        async def shut(self) -> None:
            await super().aclose()

    connections = Connections(trust_env=False)
    try:
        yield AsyncOpenAI(api_key="none", base_url="http://127.0.0.1", http_client=connections)
    finally:
        await connections.shut()
