"""Imported steps: submitted for a trajectory that was not opened here, so their tokens come with them instead of from an engine."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.chat.templates import chain_digest, message_digest
from penstock.codec import context_digest
from penstock.errors import RequestError
from penstock.gateway.dialects.base import DialectTokenizer
from penstock.gateway.session import RESERVED_PREFIX, Session, pool_refusals
from penstock.pool.base import Pool
from penstock.records import Mark, Message, Node, Sampling, Step

IMPORTED_KEY = f"{RESERVED_PREFIX}imported"
"""In the metadata of a trajectory's task."""
IMPORTED = "imported"
"""The note of a trajectory's mark."""
NO_LOGPROBS = "imported without log-probabilities"
"""The note of the mark that keeps a step out of training."""


class ForeignStep(Protocol):
    """What is read of a step that a caller submits."""

    prompt_ids: list[int]
    response_ids: list[int]
    rollout_log_probs: list[float] | None
    step_index: int
    policy_version: int


class _StoredPath(NamedTuple):
    step: int
    ids: tuple[int, ...]
    """Prompt and reply."""


def check_imported(steps: Sequence[ForeignStep], vocabulary: int) -> None:
    """RequestError 422 if one could not be stored."""
    for place, step in enumerate(steps):
        worst = max([*step.prompt_ids, *step.response_ids], default=0)
        problem = (
            "prompt_ids are empty; an imported step needs the context that it was sampled after"
            if not step.prompt_ids
            else f"token {worst} is none of the model's, which has {vocabulary}, counted from 0"
            if worst >= vocabulary
            else f"policy_version is {step.policy_version}; it is counted from 0"
            if step.policy_version < 0
            else ""
        )
        if problem:
            raise RequestError(f"steps[{place}]: {problem}", status=422, code="invalid_value", param="steps")


async def import_steps(pool: Pool, session: Session, steps: Sequence[ForeignStep], tokenizer: DialectTokenizer) -> None:
    """Append the steps to a trajectory, each after the one whose tokens its prompt begins with. Those without log-probabilities are
    kept out of training."""
    graph = await session.graph(pool)
    paths = [_StoredPath(index, _path(graph.nodes, graph.steps, index)) for index in graph.steps]
    number, node_id = graph.next_step, graph.next_node
    for submitted in sorted(steps, key=lambda step: step.step_index):
        prompt, reply = tuple(submitted.prompt_ids), tuple(submitted.response_ids)
        before = max((each for each in paths if prompt[: len(each.ids)] == each.ids), key=lambda each: len(each.ids), default=None)
        node = _node(session.rollout_id, node_id, before, prompt, tokenizer)
        step = _step(number, node, submitted, tokenizer)
        with pool_refusals(status=409, code="not_recorded"):
            await pool.append(step, node)
            if submitted.rollout_log_probs is None:
                await pool.mark(Mark(rollout_id=session.rollout_id, step=number, trainable=False, note=NO_LOGPROBS))
        paths.append(_StoredPath(number, prompt + reply))
        number, node_id = number + 1, node_id + 1
    session.drop_graph()


def _path(nodes: Mapping[int, Node], steps: Mapping[int, Step], index: int | None) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    while index is not None:
        step = steps[index]
        ids = nodes[step.node].token_ids + step.completion_ids + ids
        index = nodes[step.node].parent
    return ids


def _node(rollout_id: str, node_id: int, before: _StoredPath | None, prompt: tuple[int, ...], tokenizer: DialectTokenizer) -> Node:
    added = prompt[len(before.ids) :] if before else prompt
    message: Message = {"role": "user", "content": tokenizer.decode(added)}
    return Node(
        rollout_id=rollout_id,
        id=node_id,
        parent=before.step if before else None,
        token_ids=added,
        chain=context_digest(prompt),
        messages=(message,),
    )


def _step(number: int, node: Node, submitted: ForeignStep, tokenizer: DialectTokenizer) -> Step:
    reply = tuple(submitted.response_ids)
    message: Message = {"role": "assistant", "content": tokenizer.decode(reply)}
    return Step(
        rollout_id=node.rollout_id,
        index=number,
        node=node.id,
        transcript="main",
        completion_ids=reply,
        logprobs=tuple(submitted.rollout_log_probs or (0.0,) * len(reply)),
        versions=(submitted.policy_version,) * len(reply),
        sampling=Sampling(),
        finish="stop",
        message=message,
        chain=chain_digest(node.chain, message_digest(message)),
        context=context_digest([*submitted.prompt_ids, *reply]),
        behaviour_known=submitted.rollout_log_probs is not None,
    )
