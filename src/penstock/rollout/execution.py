"""The author's workflow and grader, run in this process: what every executor comes down to, wherever its process is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from penstock.errors import GraderError, WorkflowError
from penstock.records import Message, Task
from penstock.rollout.author_tasks import AuthorTasks, slots
from penstock.sdk.context import AgentWorkflowContext, GraderContext, finite_reward, leave_folder
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import MAIN, RolloutContext
from penstock.sdk.samples import RolloutSample, copied, plain


class WorkflowResult(NamedTuple):
    """What is known of a workflow's run besides its recorded calls."""

    samples: dict[str, list[Message]]
    """By transcript: the messages that its agents and sessions keep themselves, in their own form, as plain JSON values."""
    strays: tuple[str, ...] = ()
    """Providers that it called directly."""


class Reward(NamedTuple):
    """A finite reward for a step, for a transcript, or for the whole rollout where both are None."""

    transcript: str | None
    value: float
    step: int | None = None


class Work:
    """One agent, many rollouts at once. The grader runs outside the rollout's context: no model token is at hand."""

    def __init__(self, agent: Agent, guests: AuthorTasks) -> None:
        self._agent = agent
        self._guests = guests
        self.workflow_slots = slots(agent.workflow_config and agent.workflow_config.concurrency)
        self.grader_slots = slots(agent.grader_config and agent.grader_config.concurrency)

    async def run(
        self, task: Task, context: RolloutContext, *, timeout_s: float, artifacts_dir: Path | None = None
    ) -> WorkflowResult:
        """Run the workflow inside `context`; the deadline counts from when it starts, not from when it waits for its turn.

        Raises TimeoutError past the deadline, EngineError where a failing engine made it fail, WorkflowError where it raised; what
        the agents had said by then is still in `context`.
        """
        what = f"workflow {self._agent.workflow.__name__!r}"
        async with self.workflow_slots:
            with context:
                work = self._work(task, context, artifacts_dir)
                return await self._guests.run(work, error=WorkflowError, what=what, timeout_s=timeout_s)

    async def grade(
        self, task: Task, samples: Mapping[str, RolloutSample], *, timeout_s: float, artifacts_dir: Path | None = None
    ) -> list[Reward]:
        """The rewards of a rollout whose workflow has ended; GraderError where there is no usable one, TimeoutError if late."""
        context = GraderContext(
            label=task.label,
            samples=dict(samples),
            metadata=task.metadata,
            artifacts_dir=artifacts_dir,
            project_path=self._agent.entry.parent,
        )
        what = f"grader {self._agent.grader_name!r}"
        async with self.grader_slots:
            given = await self._guests.run(self._grade(context), error=GraderError, what=what, timeout_s=timeout_s)
        try:
            return _rewards(context, given)
        except GraderError as cause:
            raise GraderError(f"{what}: {cause}") from cause

    async def _work(self, task: Task, context: RolloutContext, artifacts_dir: Path | None) -> WorkflowResult:
        config = copied(self._agent.workflow_config)
        prompt, metadata = copied(list(task.prompt)), copied(task.metadata)
        given = AgentWorkflowContext(prompt=prompt, config=config, metadata=metadata, artifacts_dir=artifacts_dir)
        try:
            returned = await self._agent.workflow(config).run(given)
        finally:
            leave_folder(given)
        samples = await told_samples(context)
        if not samples and (messages := _messages(returned)):
            samples = {MAIN: messages}
        return WorkflowResult(samples, tuple(sorted(context.strays)))

    async def _grade(self, context: GraderContext) -> object:
        if self._agent.grader is None:
            raise GraderError("there is none; define a Grader subclass next to the workflow")
        try:
            return await self._agent.grader(copied(self._agent.grader_config)).grade(context)
        finally:
            leave_folder(context)


async def told_samples(context: RolloutContext) -> dict[str, list[Message]]:
    """What the agents and sessions of a rollout tell of their conversations."""
    return {name: plain(sample.messages) for name, sample in (await context.get_samples()).items()}


def _messages(returned: Any) -> list[Message] | None:
    """Messages that a workflow returned, as such or as the `messages` of an object; None for anything else."""
    found = plain(getattr(returned, "messages", returned)) if returned is not None else None
    is_list = isinstance(found, list) and bool(found) and all(isinstance(each, dict) for each in cast("list[Any]", found))
    return found if is_list else None


def _rewards(context: GraderContext, given: object) -> list[Reward]:
    """What the grader set; where it set nothing, the number that it returned."""
    parts = [Reward(name, finite_reward(s.reward)) for name, s in context.samples.items() if s.reward is not None]
    steps = [Reward(None, finite_reward(value), step) for step, value in sorted(context.step_rewards.items())]
    if context.reward is not None:
        return [Reward(None, finite_reward(context.reward)), *parts, *steps]
    if not parts and not steps and given is not None:
        return [Reward(None, finite_reward(given))]
    if steps and not parts:
        return steps
    if missing := sorted(name for name, sample in context.samples.items() if sample.reward is None):
        raise GraderError(f"gave no reward for {missing}; call ctx.set_sample_reward for each, or ctx.set_reward once")
    return [*parts, *steps]
