"""Makes the Step and Node of a sampled reply and stores them, before anyone is told that the reply is complete."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.errors import PoolError, RequestError
from penstock.gateway.calls import Prompt
from penstock.gateway.sessions import Session
from penstock.gateway.stream import Reply
from penstock.pool.base import Pool
from penstock.records import Node, Sampling, Step
from penstock.render.chat import digest, link

T = TypeVar("T")

SETTLE_S = 30.0
"""Bound on a write that is finished although its caller was cancelled."""


class Recorder:
    """Stores steps; what it returns is durable, and in the session's graph."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def record(
        self, session: Session, prompt: Prompt, reply: Reply, *, sampling: Sampling, transcript: str, seconds: float
    ) -> Step:
        """Store the reply as the rollout's next step; RequestError 503 where the store fails, 409 where the rollout has ended."""
        async with session.recording:
            graph = await session.graph(self._pool)
            known = graph.find(prompt.parent, prompt.chain, prompt.added)
            node = known or Node(
                rollout_id=session.rollout_id,
                id=graph.next_node,
                parent=prompt.parent,
                token_ids=prompt.added,
                chain=prompt.chain,
                messages=prompt.messages,
                tools=prompt.tools,
                reason=prompt.reason,
            )
            message = reply.message()
            step = Step(
                rollout_id=session.rollout_id,
                index=graph.next_step,
                node=node.id,
                transcript=transcript,
                completion_ids=tuple(reply.ids),
                logprobs=tuple(reply.logprobs),
                full_logprobs=None if reply.full_logprobs == reply.logprobs else tuple(reply.full_logprobs),
                versions=tuple(reply.versions),
                sampling=sampling,
                finish=reply.finish or "error",
                message=message,
                chain=link(prompt.chain, digest(message)),
                seconds=seconds,
            )
            await self._store(session, step, None if known else node)
            graph.add(step, None if known else node)
            return step

    async def _store(self, session: Session, step: Step, node: Node | None) -> None:
        try:
            await self._pool.append(step, node)
        except PoolError as error:
            session.forget()
            await self._refuse_if_ended(session)
            raise RequestError(f"the reply could not be recorded: {error}", status=503, code="not_recorded") from error

    async def _refuse_if_ended(self, session: Session) -> None:
        try:
            await session.graph(self._pool)
        except PoolError:
            return  # the store cannot even be read: it says so with the first error


async def settled(work: Coroutine[Any, Any, T]) -> T:
    """Await a short write to its end; a cancellation that comes meanwhile goes on afterwards."""
    job = asyncio.create_task(work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait({job}, timeout=SETTLE_S)
        raise
