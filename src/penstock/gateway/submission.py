"""Steps that a flow submits: each is found among those that were sampled here, by its tokens; nothing else is ever trained."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.codec import context_digest
from penstock.errors import PoolError, PoolFailed, RequestError
from penstock.gateway.flow_bodies import StepBody
from penstock.gateway.graph import TokenGraph
from penstock.gateway.serve import Service
from penstock.gateway.sessions import Sessions
from penstock.gateway.trajectories import SOURCE, Trajectories
from penstock.pool.base import Pool
from penstock.records import Attempt, Grade, Mark, Step

SUBMITTED, NOT_SUBMITTED = "submitted by its flow", "not submitted by its flow"
COMPARED = 64
"""Of the newest steps, how many are looked at to say what a refused one differs in."""


class Found(NamedTuple):
    """A submitted step and the recorded one that it is."""

    given: StepBody
    step: Step


class Accepted(NamedTuple):
    """Steps of one rollout that may be stored; none where all of them were before."""

    rollout_id: str
    graph: TokenGraph
    found: list[Found]


class Submissions:
    """Takes what flows say of their steps. The same again changes nothing."""

    def __init__(self, pool: Pool, sessions: Sessions, trajectories: Trajectories, service: Service) -> None:
        self._pool = pool
        self._sessions = sessions
        self._trajectories = trajectories
        self._service = service

    async def take(self, by_rollout: Mapping[str, Sequence[StepBody]], channel: str | None) -> None:
        """Store the rewards of steps, and complete a rollout with its last one; RequestError before anything is stored."""
        accepted = [await self._accept(rollout_id, steps, channel) for rollout_id, steps in by_rollout.items()]
        for rollout_id, graph, found in filter(None, accepted):
            for each in found:
                await self._store(rollout_id, each)
            if any(given.is_last for given, _ in found):
                await self._mark_others(rollout_id, graph)
                await self._trajectories.finish(rollout_id)

    async def _accept(self, rollout_id: str, steps: Sequence[StepBody], channel: str | None) -> Accepted | None:
        try:
            session = await self._sessions.get(rollout_id)
            graph = await session.graph(self._pool)
        except RequestError as error:
            if error.code not in ("rollout_complete", "rollout_ended"):
                raise
            await self._check_repeated(rollout_id, steps, error)
            return None
        if channel not in (None, session.rollout.channel):
            self._service.count("ignored:channel")
        return Accepted(rollout_id, graph, [self._find(graph, given) for given in steps])

    def _find(self, graph: TokenGraph, given: StepBody) -> Found:
        step = find_step(graph.steps, given)
        if step is None:
            raise RequestError(f"this step was not sampled here: {_difference(graph, given)}", status=409, code="not_sampled")
        for name in given.ignored():
            self._service.count(f"ignored:{name}")
        told = given.rollout_log_probs
        if told is not None and not all(map(_close, told, step.logprobs)):
            self._service.count("replaced:rollout_log_probs")
        if given.policy_version not in (0, *step.versions):
            self._service.count("replaced:policy_version")
        return Found(given, step)

    async def _store(self, rollout_id: str, found: Found) -> None:
        index, reward = found.step.index, found.given.reward
        if reward is None:
            await self._mark(Mark(rollout_id=rollout_id, step=index, note=SUBMITTED))
        else:
            await self._trajectories.grade(Grade(rollout_id=rollout_id, reward=reward, source=SOURCE, step=index))

    async def _mark_others(self, rollout_id: str, graph: TokenGraph) -> None:
        """Take steps that were never submitted out of training: the flow did not stand by them."""
        attempt = await self._pool.attempt(rollout_id, first_step=graph.next_step, first_node=graph.next_node)
        known = _submitted(attempt) | {mark.step for mark in attempt.marks}
        for index in sorted(graph.steps.keys() - known):
            await self._mark(Mark(rollout_id=rollout_id, step=index, trainable=False, note=NOT_SUBMITTED))

    async def _mark(self, mark: Mark) -> None:
        try:
            await self._pool.mark(mark)
        except PoolFailed:
            raise
        except PoolError as error:
            raise RequestError(str(error), status=409, code="not_marked") from error

    async def _check_repeated(self, rollout_id: str, steps: Sequence[StepBody], late: RequestError) -> None:
        """Let pass what was taken before its rollout was complete; `late` for anything new."""
        attempt = await self._pool.attempt(rollout_id)
        recorded, submitted = {step.index: step for step in attempt.steps}, _submitted(attempt)
        rewards = {grade.step: grade.reward for grade in attempt.grades if grade.source == SOURCE and grade.step is not None}
        for given in steps:
            step = find_step(recorded, given)
            if step is None or step.index not in submitted or rewards.get(step.index) != given.reward:
                raise late


def find_step(steps: Mapping[int, Step], given: StepBody) -> Step | None:
    """The recorded step with exactly these tokens; of several, the one with the index that is given."""
    digest, reply = context_digest([*given.prompt_ids, *given.response_ids]), tuple(given.response_ids)
    same = [step for step in steps.values() if step.context == digest and step.completion_ids == reply]
    return next((step for step in same if step.index == given.step_index), same[0] if same else None)


def _submitted(attempt: Attempt) -> set[int]:
    graded = {grade.step for grade in attempt.grades if grade.source == SOURCE and grade.step is not None}
    return graded | {mark.step for mark in attempt.marks if mark.note == SUBMITTED and mark.step is not None}


def _close(told: float, recorded: float) -> bool:
    return math.isclose(told, recorded, abs_tol=1e-3)


def _difference(graph: TokenGraph, given: StepBody) -> str:
    """What the step differs in from the recorded one that is most like it."""
    newest = sorted(graph.steps)[-COMPARED:]
    if not newest:
        return "its rollout has no recorded call; generate through this gateway first"
    ids = [*given.prompt_ids, *given.response_ids]
    alike = {index: _alike(graph.context(index), ids) for index in newest}
    best = max(newest, key=lambda index: (alike[index], index))
    prompt, reply = len(graph.prompt(graph.steps[best].node)), len(graph.steps[best].completion_ids)
    at = alike[best]
    if at == prompt + reply == len(ids):
        return f"step {best} has these tokens, but {prompt} of them are its prompt, not {len(given.prompt_ids)}"
    which, place = ("prompt_ids", at) if at < prompt else ("response_ids", at - prompt)
    sizes = f"{prompt} and {reply} tokens were recorded, {len(given.prompt_ids)} and {len(given.response_ids)} given"
    return f"it differs from step {best} in {which}[{place}] ({sizes}); submit the ids that /generate answered, unchanged"


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
