"""Recording: makes the Step and Node of a sampled reply and stores them, before the caller learns that the reply is complete."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_

from penstock.chat.media import without_bytes
from penstock.chat.templates import chain_digest, message_digest
from penstock.errors import PoolError, RequestError
from penstock.gateway.graph import TokenGraph
from penstock.gateway.reply import ReplyBuilder
from penstock.gateway.request import Prompt
from penstock.gateway.session import Session
from penstock.pool.base import Pool
from penstock.records import Message, Node, Sampling, Step
from penstock.system.redaction import Redactor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """What a step records besides the reply."""

    sampling: Sampling
    transcript: str
    answer: str
    choice: int
    created: float
    seconds: float
    policy: str = ""


class Recorder:
    """Stores steps. A step that it returns is durable and in the session's graph."""

    def __init__(self, pool: Pool, redactor: Redactor, breaks: Counter[str]) -> None:
        self._pool = pool
        self._breaks = breaks
        """Counts the break reasons of new nodes."""
        self._redactor = redactor

    async def record(self, session: Session, prompt: Prompt, reply: ReplyBuilder, metadata: StepMetadata) -> Step:
        """Store the reply as the rollout's next step; RequestError 503 if the store fails, 409 if the rollout has ended."""

        def make(index: int, node: Node, context: str) -> Step:
            return _step(index, node, reply, metadata, context)

        return await self._append(session, prompt, reply.ids, metadata.policy, make)

    async def repeat(self, session: Session, prompt: Prompt, recorded: Step) -> Step:
        """Store a step of another rollout as the next one of this branch; raises as `record` does."""

        def make(index: int, node: Node, context: str) -> Step:
            chain = chain_digest(node.messages_digest, message_digest(recorded.message))
            name, number = node.rollout_id, node.id
            return replace(
                recorded,
                rollout_id=name,
                index=index,
                node=number,
                messages_digest=chain,
                context_digest=context,
                seconds=0.0,
                replayed=True,
            )

        return await self._append(session, prompt, recorded.completion_ids, recorded.policy, make)

    async def _append(
        self, session: Session, prompt: Prompt, ids: Sequence[int], policy: str, make: Callable[[int, Node, str], Step]
    ) -> Step:
        async with session.recording:
            graph = await session.graph(self._pool)
            known = graph.find(prompt.parent, prompt.chain, prompt.added, policy)
            node = known or _node(session.rollout_id, graph, prompt)
            context = graph.context_hash(node, ids)
            step = make(graph.next_step, node, context.hexdigest())
            await self._store(session, step, None if known else node)
            graph.add(step, None if known else node, context)
            graph.keep_prompt(node.id, prompt.ids)
            self._breaks.update([node.reason] if node.reason and not known else ())
            return step

    def clean(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages as they are stored: without secrets, and with digests in place of bytes."""
        kept = tuple(map(without_bytes, messages))
        return kept if self._redactor.is_clean(kept) else tuple(map(self._redactor.message, kept))

    async def _store(self, session: Session, step: Step, node: Node | None) -> None:
        """Append both to the pool, with secrets removed from their texts."""
        clean, clean_node = self._clean_step(step), node and self._clean_node(node)
        session.pool_differs = session.pool_differs or clean is not step or clean_node is not node
        try:
            await self._pool.append(clean, clean_node)
        except PoolError as error:
            session.drop_graph()  # after a conflict, another gateway has recorded a step: a retry reads it
            await self._refuse_if_ended(session)
            raise RequestError(f"the reply could not be recorded: {error}", status=503, code="not_recorded") from error
        except asyncio.CancelledError:
            session.drop_graph()  # the pool may have the step or not: the next call reads it
            raise

    def _clean_step(self, step: Step) -> Step:
        message = self._redactor.message(step.message)
        return step if message is step.message else replace(step, message=message)

    def _clean_node(self, node: Node) -> Node:
        messages = self.clean(node.messages)
        same = all(map(is_, messages, node.messages))
        return node if same else replace(node, messages=messages)

    async def _refuse_if_ended(self, session: Session) -> None:
        try:
            await session.graph(self._pool)
        except PoolError:
            return  # the store cannot be read either: the first error says why


def _node(rollout_id: str, graph: TokenGraph, prompt: Prompt) -> Node:
    return Node(
        rollout_id=rollout_id,
        id=graph.next_node,
        parent=prompt.parent,
        token_ids=prompt.added,
        messages_digest=prompt.chain,
        messages=prompt.messages,
        tools=prompt.tools,
        reason=prompt.reason,
        pictures=prompt.added_pictures,
    )


def _step(index: int, node: Node, reply: ReplyBuilder, metadata: StepMetadata, context: str) -> Step:
    message = reply.message()
    return Step(
        rollout_id=node.rollout_id,
        index=index,
        node=node.id,
        transcript=metadata.transcript,
        completion_ids=tuple(reply.ids),
        logprobs=tuple(reply.logprobs),
        full_logprobs=None if reply.full_logprobs == reply.logprobs else tuple(reply.full_logprobs),
        behaviour_known=reply.behaviour_known,
        versions=tuple(reply.versions),
        sampling=metadata.sampling,
        finish=reply.finish or "error",
        message=message,
        messages_digest=chain_digest(node.messages_digest, message_digest(message)),
        seconds=metadata.seconds,
        answer=metadata.answer,
        choice=metadata.choice,
        created=metadata.created,
        context_digest=context,
        usage=reply.usage,
        policy=metadata.policy,
        kept=tuple(reply.kept),
        most_likely=tuple(reply.most_likely),
    )
