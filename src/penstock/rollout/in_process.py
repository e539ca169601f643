"""Runs the author's workflow and grader in this process. Every executor ends up here, in whichever process it runs the agent."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from penstock.errors import GraderError, WorkerLost, WorkflowError
from penstock.records import Grade, Message, Task, total_reward
from penstock.rollout.author_tasks import AuthorTasks, make_slots
from penstock.sdk.context import AgentWorkflowContext, GraderContext, finite_reward, remove_empty_artifacts_dir
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import RolloutContext
from penstock.sdk.samples import RolloutSample, fast_copy, to_json_values

REMEDY = "use ctx.openai() or ctx.anthropic(), an integration, or ctx.base_url and ctx.api_key with another client"


class WorkflowResult(NamedTuple):
    """What a workflow's run gave besides its recorded calls."""

    samples: dict[str, list[Message]]
    """By transcript: the messages that its agents and sessions keep themselves, in their framework's form, as JSON values."""
    direct_calls: tuple[str, ...] = ()
    """Model providers that it called directly, past the gateway."""
    returned: list[Message] | None = None
    """The messages that it returned."""


class Reward(NamedTuple):
    """A finite reward for a step, for a transcript, or for the whole rollout where both are None."""

    transcript: str | None
    value: float
    step: int | None = None
    components: dict[str, float] = {}  # noqa: RUF012  (as for any tuple, nobody changes it)
    """Named parts of a reward for the whole rollout, which includes their sum."""

    def as_grade(self, rollout_id: str, source: str) -> Grade:
        return Grade(
            rollout_id=rollout_id,
            reward=self.value,
            source=source,
            transcript=self.transcript,
            step=self.step,
            components=self.components,
        )


class InProcessAgent:
    """Runs many rollouts of one agent at once. The grader runs outside the rollout's context, so it has no model token."""

    def __init__(self, agent: Agent, author_tasks: AuthorTasks, *, workflow_tasks: AuthorTasks | None = None) -> None:
        """`workflow_tasks` run the workflow if it is not the author's code: a command."""
        self._agent = agent
        self._author_tasks = author_tasks
        self._workflow_tasks = workflow_tasks or author_tasks
        self.workflow_slots = make_slots(agent.workflow_config and agent.workflow_config.concurrency)
        self.grader_slots = make_slots(agent.grader_config and agent.grader_config.concurrency)

    async def run(
        self, task: Task, context: RolloutContext, *, timeout_s: float, artifacts_dir: Path | None = None
    ) -> WorkflowResult:
        """Runs the workflow inside `context`. The deadline counts from when it starts, not while it waits for a slot.

        Raises TimeoutError past the deadline, EngineError if a failing engine made it fail, WorkflowError if it raised. The
        agents' conversations up to then stay in `context`.
        """
        name = f"workflow {self._agent.workflow.__name__!r}"
        async with self.workflow_slots:
            with context:
                workflow = self._run_workflow(task, context, artifacts_dir)
                try:
                    return await self._workflow_tasks.run(workflow, error=WorkflowError, what=name, timeout_s=timeout_s)
                except WorkflowError as error:
                    if hint := _client_hint(str(error), context):
                        raise WorkflowError(f"{name}: {hint} ({str(error).removeprefix(f'{name}: ')})") from error.__cause__
                    raise

    async def grade(
        self, task: Task, samples: Mapping[str, RolloutSample], *, timeout_s: float, artifacts_dir: Path | None = None
    ) -> list[Reward]:
        """Runs the grader on a rollout whose workflow has ended. Raises GraderError without a usable reward, or TimeoutError."""
        name = f"grader {self._agent.grader_name!r}"
        async with self.grader_slots:
            while True:
                context = GraderContext(
                    label=task.label,
                    samples=dict(samples),
                    metadata=task.metadata,
                    artifacts_dir=artifacts_dir,
                    project_path=self._agent.entry.parent,
                )
                grader = self._run_grader(context)
                with suppress(WorkerLost):  # it blocked the event loop: next time it runs in a thread, where it may
                    returned = await self._author_tasks.run(grader, error=GraderError, what=name, timeout_s=timeout_s)
                    break
                for sample in samples.values():
                    sample.reward = None
        try:
            return _rewards(context, returned)
        except GraderError as cause:
            raise GraderError(f"{name}: {cause}") from cause

    async def _run_workflow(self, task: Task, context: RolloutContext, artifacts_dir: Path | None) -> WorkflowResult:
        # Copies, so that a rollout that changes its prompt or config changes them for no other.
        config = fast_copy(self._agent.workflow_config)
        prompt, metadata = fast_copy(list(task.prompt)), fast_copy(task.metadata)
        workflow_context = AgentWorkflowContext(prompt=prompt, config=config, metadata=metadata, artifacts_dir=artifacts_dir)
        try:
            returned = await self._agent.workflow(config).run(workflow_context)
        finally:
            remove_empty_artifacts_dir(workflow_context)
        samples = await collect_samples(context)
        return WorkflowResult(samples, tuple(sorted(context.direct_calls)), _messages(returned))

    async def _run_grader(self, context: GraderContext) -> object:
        if self._agent.grader is None:
            raise GraderError("there is none; define a Grader subclass next to the workflow")
        try:
            return await self._agent.grader(fast_copy(self._agent.grader_config)).grade(context)
        finally:
            remove_empty_artifacts_dir(context)


def _client_hint(message: str, context: RolloutContext) -> str:
    """What to do about a client that was made without the rollout's address: its own advice, to set a key, would be wrong."""
    if context.direct_calls:
        return f"it called {', '.join(sorted(context.direct_calls))} directly: {REMEDY}"
    lacks_key = "api_key" in message and any(word in message for word in ("credentials", "authentication", "must be set"))
    return f"no key of a provider is needed here: {REMEDY}" if lacks_key else ""


async def collect_samples(context: RolloutContext) -> dict[str, list[Message]]:
    """Asks the rollout's sample sources for their conversations; returns the messages by transcript."""
    return {name: to_json_values(sample.messages) for name, sample in (await context.get_samples()).items()}


def _messages(returned: Any) -> list[Message] | None:
    """Returns the messages that a workflow returned, as a list or as an object's `messages`; None for anything else."""
    found = to_json_values(getattr(returned, "messages", returned)) if returned is not None else None
    is_list = isinstance(found, list) and bool(found) and all(isinstance(each, dict) for each in cast("list[Any]", found))
    return found if is_list else None


def _rewards(context: GraderContext, returned: object) -> list[Reward]:
    """Returns the rewards that the grader set; if it set none, the number that it returned.

    With named parts there is always a reward for the whole rollout: what it is without them, 0 if nothing, plus their sum.
    """
    if not (parts := dict(context.components)):
        return _plain_rewards(context, returned)
    graded = context.reward is not None or returned is not None or context.step_rewards
    graded = graded or any(sample.reward is not None for sample in context.samples.values())
    rewards = _plain_rewards(context, returned) if graded else []
    total = finite_reward((total_reward([each.as_grade("", "") for each in rewards]) or 0.0) + sum(parts.values()))
    return [Reward(None, total, None, parts), *(each for each in rewards if each.transcript is not None or each.step is not None)]


def _plain_rewards(context: GraderContext, returned: object) -> list[Reward]:
    parts = [Reward(name, finite_reward(s.reward)) for name, s in context.samples.items() if s.reward is not None]
    steps = [Reward(None, finite_reward(value), step) for step, value in sorted(context.step_rewards.items())]
    if context.reward is not None:
        return [Reward(None, finite_reward(context.reward)), *parts, *steps]
    if not parts and not steps and returned is not None:
        return [Reward(None, finite_reward(returned))]
    if steps and not parts:
        finite_reward(sum(step.value for step in steps))  # which is the rollout's
        return steps
    if missing := sorted(name for name, sample in context.samples.items() if sample.reward is None):
        raise GraderError(f"gave no reward for {missing}; call ctx.set_sample_reward for each, or ctx.set_reward once")
    return [*parts, *steps]
