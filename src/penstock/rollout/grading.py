"""Runs the author's grader on what was recorded of a rollout, and checks its verdict."""

from copy import deepcopy
from typing import NamedTuple

from penstock.errors import GraderError
from penstock.records import Attempt, Task
from penstock.rollout.guests import Guests, slots
from penstock.rollout.transcripts import transcripts
from penstock.sdk.context import GraderContext, RolloutSample, finite_reward
from penstock.sdk.discovery import Agent


class Reward(NamedTuple):
    """A finite reward for a transcript, or for the whole rollout where `transcript` is None."""

    transcript: str | None
    value: float


class Judge:
    """One grader class, many rollouts at once. It runs outside the rollout's context: no model token is at hand."""

    def __init__(self, agent: Agent, guests: Guests) -> None:
        self.name = agent.grader_config.name if agent.grader_config else agent.grader.__name__
        self._agent = agent
        self._guests = guests
        self._slots = slots(agent.grader_config and agent.grader_config.concurrency)

    async def judge(self, task: Task, attempt: Attempt, *, timeout_s: float) -> list[Reward]:
        """The rewards of an attempt whose workflow has ended; GraderError where there is no usable one, TimeoutError if late."""
        told = {name: RolloutSample(id=name, messages=deepcopy(messages)) for name, messages in transcripts(attempt).items()}
        context = GraderContext(label=task.label, samples=told, metadata=task.metadata)
        what = f"grader {self.name!r}"
        async with self._slots:
            given = await self._guests.run(self._grade(context), error=GraderError, what=what, timeout_s=timeout_s)
        try:
            return _rewards(context, given)
        except GraderError as cause:
            raise GraderError(f"{what}: {cause}") from cause

    async def _grade(self, context: GraderContext) -> object:
        return await self._agent.grader(deepcopy(self._agent.grader_config)).grade(context)


def _rewards(context: GraderContext, given: object) -> list[Reward]:
    """What the grader set; where it set nothing, the number that it returned."""
    parts = [Reward(name, finite_reward(s.reward)) for name, s in context.samples.items() if s.reward is not None]
    if context.reward is not None:
        return [Reward(None, finite_reward(context.reward)), *parts]
    if not parts and given is not None:
        return [Reward(None, finite_reward(given))]
    if missing := sorted(name for name, sample in context.samples.items() if sample.reward is None):
        raise GraderError(f"gave no reward for {missing}; call ctx.set_sample_reward for each, or ctx.set_reward once")
    return parts
