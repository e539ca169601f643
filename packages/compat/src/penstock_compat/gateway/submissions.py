"""Steps that flows submit: rewards for steps that were sampled here, and steps that were sampled elsewhere."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.chat.templates import chain_digest, message_digest
from penstock.codec import context_digest
from penstock.errors import RequestError
from penstock.gateway.dialects.base import DialectTokenizer
from penstock.gateway.graph import TokenGraph
from penstock.gateway.pipeline import CallPipeline
from penstock.gateway.routes import DEFAULT_PROMPT
from penstock.gateway.session import RESERVED_PREFIX, Session, Sessions, pool_refusals
from penstock.pool.base import Pool
from penstock.records import Grade, Mark, Message, Node, Rollout, Sampling, Step
from penstock_compat.gateway.bodies import StepBody
from penstock_compat.gateway.trajectories import FLOW_SOURCE, Registration, Trajectories

IMPORTED_KEY = f"{RESERVED_PREFIX}imported"
"""In the metadata of a trajectory's task."""
IMPORTED = "imported"
"""The note of a trajectory's mark."""
NO_LOGPROBS = "imported without log-probabilities"
"""The note of the mark that keeps a step out of training."""
SUBMITTED, NOT_SUBMITTED = "submitted by its flow", "not submitted by its flow"
MAX_COMPARED_STEPS = 8
"""Newest steps that a refused one is compared with, to say in what it differs."""


class MatchedStep(NamedTuple):
    submitted: StepBody
    recorded: Step


class RolloutSubmission(NamedTuple):
    """The submitted steps of one rollout, checked and not yet stored."""

    rollout_id: str
    steps: Sequence[StepBody]
    imported: Sequence[StepBody] = ()
    """Those that were sampled elsewhere."""
    unknown: bool = False
    """Whether the rollout is not open here."""


class Submissions:
    """Stores what flows submit. Submitting the same again changes nothing."""

    def __init__(self, pool: Pool, sessions: Sessions, trajectories: Trajectories, pipeline: CallPipeline) -> None:
        self._pool = pool
        self._sessions = sessions
        self._trajectories = trajectories
        self._pipeline = pipeline

    async def take(self, by_rollout: Mapping[str, Sequence[StepBody]], channel: str | None) -> None:
        """Store the rewards of steps, and complete a rollout with its last one; RequestError before anything is stored."""
        accepted = [await self._accept(rollout_id, steps, channel) for rollout_id, steps in by_rollout.items()]
        for each in filter(None, accepted):
            await self._import(each, channel)
            graph = await (await self._sessions.get(each.rollout_id)).graph(self._pool)
            for submitted in each.steps:
                await self._store(each.rollout_id, self._find(graph, submitted))
            if any(submitted.is_last for submitted in each.steps):
                await self._mark_others(each.rollout_id, graph)
                await self._trajectories.finish(each.rollout_id)

    async def _accept(self, rollout_id: str, steps: Sequence[StepBody], channel: str | None) -> RolloutSubmission | None:
        try:
            session = await self._sessions.get(rollout_id)
            graph = await session.graph(self._pool)
        except RequestError as error:
            if error.code == "unknown_rollout":
                check_imported(steps, self._vocabulary)
                return RolloutSubmission(rollout_id, steps, imported=steps, unknown=True)
            if error.code not in ("rollout_complete", "rollout_ended"):
                raise
            await self._check_repeated(rollout_id, steps, error)
            return None
        if channel not in (None, session.rollout.channel):
            self._pipeline.count("ignored:channel")
        missing = [submitted for submitted in steps if find_step(graph.steps, submitted) is None]
        if missing and IMPORTED_KEY in ((await self._pool.task(rollout_id)).metadata or {}):
            check_imported(missing, self._vocabulary)
            return RolloutSubmission(rollout_id, steps, imported=missing)
        for submitted in missing:
            raise RequestError(f"this step was not sampled here: {_difference(graph, submitted)}", status=409, code="not_sampled")
        return RolloutSubmission(rollout_id, steps)

    @property
    def _vocabulary(self) -> int:
        tokenizer: Any = self._pipeline.source.tokenizer
        return tokenizer.core.get_vocab_size()

    async def _import(self, submission: RolloutSubmission, channel: str | None) -> None:
        """Open the trajectory if need be, and append what was sampled elsewhere."""
        if not submission.imported:
            return
        if submission.unknown:
            prompt_uid = submission.steps[0].prompt_uid or DEFAULT_PROMPT
            opened = Registration(prompt_uid=prompt_uid, channel=channel, metadata={IMPORTED_KEY: True})
            await self._trajectories.register(submission.rollout_id, opened)
            await self._mark(Mark(rollout_id=submission.rollout_id, note=IMPORTED))
        self._pipeline.count("imported_steps")
        session = await self._sessions.get(submission.rollout_id)
        await import_steps(self._pool, session, submission.imported, self._pipeline.source.tokenizer)

    def _find(self, graph: TokenGraph, submitted: StepBody) -> MatchedStep:
        step = find_step(graph.steps, submitted)
        assert step is not None, "`_accept` refuses steps that are not recorded"
        for name in submitted.ignored():
            self._pipeline.count(f"ignored:{name}")
        logprobs = submitted.rollout_log_probs
        if logprobs is not None and not all(map(_close, logprobs, step.logprobs)):
            self._pipeline.count("replaced:rollout_log_probs")
        if submitted.policy_version not in (0, *step.versions):
            self._pipeline.count("replaced:policy_version")
        return MatchedStep(submitted, step)

    async def _store(self, rollout_id: str, found: MatchedStep) -> None:
        index, reward = found.recorded.index, found.submitted.reward
        if reward is None and not is_kept_out(found):
            await self._mark(Mark(rollout_id=rollout_id, step=index, note=SUBMITTED))
        elif reward is None:
            return
        else:
            await self._trajectories.grade(Grade(rollout_id=rollout_id, reward=reward, source=FLOW_SOURCE, step=index))

    async def _mark_others(self, rollout_id: str, graph: TokenGraph) -> None:
        """Exclude steps that were never submitted from training."""
        rollout = await self._pool.rollout(rollout_id, first_step=graph.next_step, first_node=graph.next_node)
        known = _submitted(rollout) | {mark.step for mark in rollout.marks}
        for index in sorted(graph.steps.keys() - known):
            await self._mark(Mark(rollout_id=rollout_id, step=index, trainable=False, note=NOT_SUBMITTED))

    async def _mark(self, mark: Mark) -> None:
        with pool_refusals(status=409, code="not_marked"):
            await self._pool.mark(mark)

    async def _check_repeated(self, rollout_id: str, steps: Sequence[StepBody], late: RequestError) -> None:
        """Accept a repeated submission to a rollout that has ended; raises `late` for anything new."""
        rollout = await self._pool.rollout(rollout_id)
        recorded, known = {step.index: step for step in rollout.steps}, _submitted(rollout)
        rewards = {grade.step: grade.reward for grade in rollout.grades if grade.source == FLOW_SOURCE and grade.step is not None}
        for submitted in steps:
            step = find_step(recorded, submitted)
            if step is None or step.index not in known or rewards.get(step.index) != submitted.reward:
                raise late


def is_kept_out(found: MatchedStep) -> bool:
    """Whether it was imported without log-probabilities: it has no answer's name, and its mark says why."""
    return not (found.recorded.answer or found.recorded.behaviour_known)


def find_step(steps: Mapping[int, Step], submitted: StepBody) -> Step | None:
    """The recorded step with exactly these tokens; of several, the one with the submitted index."""
    digest, reply_ids = context_digest([*submitted.prompt_ids, *submitted.response_ids]), tuple(submitted.response_ids)
    same = [step for step in steps.values() if step.context_digest == digest and step.completion_ids == reply_ids]
    return next((step for step in same if step.index == submitted.step_index), same[0] if same else None)


def _submitted(rollout: Rollout) -> set[int]:
    graded = {grade.step for grade in rollout.grades if grade.source == FLOW_SOURCE and grade.step is not None}
    return graded | {mark.step for mark in rollout.marks if mark.note in (SUBMITTED, NO_LOGPROBS) and mark.step is not None}


def _close(submitted: float, recorded: float) -> bool:
    return math.isclose(submitted, recorded, abs_tol=1e-3)


def _difference(graph: TokenGraph, submitted: StepBody) -> str:
    """How the step differs from the most similar recorded one."""
    newest = sorted(graph.steps)[-MAX_COMPARED_STEPS:]
    if not newest:
        return "its rollout has no recorded call; generate through this gateway first"
    ids = [*submitted.prompt_ids, *submitted.response_ids]
    alike = {index: _alike(graph.context(index), ids) for index in newest}
    best = max(newest, key=lambda index: (alike[index], index))
    prompt, reply = len(graph.prompt(graph.steps[best].node)), len(graph.steps[best].completion_ids)
    at = alike[best]
    if at == prompt + reply == len(ids):
        return f"step {best} has these tokens, but {prompt} of them are its prompt, not {len(submitted.prompt_ids)}"
    which, index = ("prompt_ids", at) if at < prompt else ("response_ids", at - prompt)
    sizes = f"{prompt} and {reply} tokens were recorded, {len(submitted.prompt_ids)} and {len(submitted.response_ids)} given"
    return f"it differs from step {best} in {which}[{index}] ({sizes}); submit the ids that /generate answered, unchanged"


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# Steps that were sampled elsewhere


class _StoredPath(NamedTuple):
    step: int
    ids: tuple[int, ...]
    """Prompt and reply."""


def check_imported(steps: Sequence[StepBody], vocabulary: int) -> None:
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


async def import_steps(pool: Pool, session: Session, steps: Sequence[StepBody], tokenizer: DialectTokenizer) -> None:
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
        messages_digest=context_digest(prompt),
        messages=(message,),
    )


def _step(number: int, node: Node, submitted: StepBody, tokenizer: DialectTokenizer) -> Step:
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
        messages_digest=chain_digest(node.messages_digest, message_digest(message)),
        context_digest=context_digest([*submitted.prompt_ids, *reply]),
        behaviour_known=submitted.rollout_log_probs is not None,
    )
