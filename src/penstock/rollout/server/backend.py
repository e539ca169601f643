"""Back ends of the rollout server: what runs the workflow and the grader, and tells how each ended. LocalBackend does it here."""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from penstock.config import own_rollout
from penstock.errors import ConfigError, EngineError, GraderError, WorkflowError
from penstock.events import Events
from penstock.records import End, Task
from penstock.rollout.executors.base import artifacts_dir
from penstock.rollout.guests import Guests
from penstock.rollout.runner import no_call
from penstock.rollout.server.failures import category_of
from penstock.rollout.server.wire import CompletionReply, RolloutErrorCategory, RolloutStatus, Seconds, Segment
from penstock.rollout.transcripts import Transcript, make_samples
from penstock.rollout.work import Reward, Told, Work, told_samples
from penstock.sdk.discovery import Agent
from penstock.sdk.grader import Grader, GraderConfig
from penstock.sdk.routing import RolloutContext, get_rollout_context, outside_rollouts
from penstock.sdk.samples import RolloutSample
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig

ARTIFACTS = Path(".penstock/artifacts")
DEADLINE_S = 3600.0
"""Of a workflow or grader whose request names none."""
TELL_S = 5.0
"""How long the agents of a failed workflow have to tell their conversations."""


class ExecutionRequest(BaseModel):
    """One rollout to run."""

    id: Segment
    prompt: list[dict[str, Any]]
    label: str | None = None
    metadata: dict[str, Any] | None = None
    agent_timeout_sec: Seconds | None = None
    grader_timeout_sec: Seconds | None = None


@dataclass(kw_only=True)
class ExecutionResult:
    """How a workflow or a grader ended. A failed one has samples too, as far as there are any."""

    status: RolloutStatus
    samples: dict[str, RolloutSample] = field(default_factory=dict[str, RolloutSample])
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    strays: tuple[str, ...] = ()
    """Providers that the workflow called directly."""
    reward: float | None = None
    """Of the whole rollout, where its grader gave one."""
    step_rewards: dict[int, float] = field(default_factory=dict[int, float])
    """By the index of the call."""
    filled: tuple[str, ...] = ()
    """Samples that carry the whole rollout's reward, since they have none of their own."""
    end: End | None = None
    """How a rollout that failed ends, where that is known better than by the category."""


WorkflowComplete = Callable[[ExecutionResult], Awaitable[Any]]
"""Told how the workflow ended; gives the CompletionReply of whoever asked for the rollout, or nothing."""
GraderComplete = Callable[[ExecutionResult], Awaitable[Any]]


class ExecutionBackend(ABC):
    """Runs rollouts. The server enters a rollout's RolloutContext before it calls `execute`."""

    @abstractmethod
    async def execute(
        self, request: ExecutionRequest, on_workflow_complete: WorkflowComplete, on_grader_complete: GraderComplete | None = None
    ) -> None:
        """Run the workflow and say how it ended, once; then, if asked to, grade it and say how that ended, once."""

    @property
    def max_concurrency(self) -> int:
        """How many workflows may run at once; 0 is any number."""
        return 0

    def health(self) -> dict[str, Any]:
        """Whether rollouts can be run."""
        return {"status": "ok"}


class LocalBackend(ExecutionBackend):
    """Runs a workflow and its grader in this process; each is a class or config, or `"module:attr"`.

    `context` makes the RolloutContext of a rollout that is executed outside of any; by default it comes from the environment that
    `penstock run` sets. Workflows and graders have places of their own, as their configs say: a grader holds no workflow back.
    """

    def __init__(
        self,
        *,
        workflow: type[AgentWorkflow[Any]] | str,
        workflow_config: AgentWorkflowConfig | str | None = None,
        grader: type[Grader] | str | None = None,
        grader_config: GraderConfig | str | None = None,
        context: Callable[[], RolloutContext] | None = None,
        artifacts: Path | None = ARTIFACTS,
        events: Events | None = None,
        grace_s: float = 5.0,
    ) -> None:
        loaded: type[AgentWorkflow[Any]] = _load(workflow)
        agent = Agent(
            entry=Path(_file(loaded)),
            workflow=loaded,
            workflow_config=_load(workflow_config),
            grader=_load(grader),
            grader_config=_load(grader_config),
        )
        self._agent = agent
        self._context = context or _environment
        self._artifacts = artifacts
        self._guests = Guests(agent.entry.parent, events or Events(), grace_s=grace_s)
        self._work = Work(agent, self._guests)

    @property
    def max_concurrency(self) -> int:
        """See `ExecutionBackend`."""
        return self._work.workflow_slots.limit or 0

    def health(self) -> dict[str, Any]:
        """See `ExecutionBackend`."""
        slots = self._work.workflow_slots
        counts = {"max_concurrent": slots.limit, "queued": slots.queued, "running": slots.running}
        return {"status": "ok", "concurrency": counts}

    async def execute(
        self, request: ExecutionRequest, on_workflow_complete: WorkflowComplete, on_grader_complete: GraderComplete | None = None
    ) -> None:
        """See `ExecutionBackend`. The grader sees what `on_workflow_complete` gives of transcripts that no agent told."""
        context = get_rollout_context() or self._context()
        task = Task(id=request.id, prompt=tuple(request.prompt), label=request.label, metadata=request.metadata)
        result = await self._run(task, context, request.agent_timeout_sec or DEADLINE_S)
        reply = await on_workflow_complete(result)
        if on_grader_complete is None:
            return
        if result.status is RolloutStatus.SUCCESS:
            result = await self._grade(task, result, _recorded(reply), request.grader_timeout_sec or DEADLINE_S)
        await on_grader_complete(result)

    async def _run(self, task: Task, context: RolloutContext, limit_s: float) -> ExecutionResult:
        try:
            with artifacts_dir(self._artifacts, task.id) as folder:
                told = await self._work.run(task, context, timeout_s=limit_s, artifacts_dir=folder)
        except TimeoutError as error:
            text = f"the workflow ran longer than agent_timeout_sec = {limit_s:g}; raise it or do less"
            return await self._failed(error, text, context)
        except (WorkflowError, EngineError) as error:
            return await self._failed(error, str(error), context)
        return ExecutionResult(status=RolloutStatus.SUCCESS, samples=make_samples({}, told.samples), strays=told.strays)

    async def _failed(self, error: Exception, text: str, context: RolloutContext) -> ExecutionResult:
        """A failed workflow's result, with what its agents had said by then."""
        strays = tuple(sorted(context.strays))
        try:
            told = await self._guests.run(told_samples(context), error=WorkflowError, what="the samples", timeout_s=TELL_S)
        except (TimeoutError, WorkflowError, EngineError):
            told = {}
        category, end = category_of(error, context.base_url), _end_of(error)
        return _failure(text, category, samples=make_samples({}, told), strays=strays, end=end)

    async def _grade(
        self, task: Task, result: ExecutionResult, recorded: Mapping[str, Transcript], limit_s: float
    ) -> ExecutionResult:
        samples = make_samples(recorded, {name: sample.messages for name, sample in result.samples.items()})
        ungraded = {"samples": make_samples({}, {name: sample.messages for name, sample in samples.items()})}
        if not samples:
            return _failure(no_call(Told({}, result.strays)), RolloutErrorCategory.VALIDATION_ERROR)
        try:
            with outside_rollouts(), artifacts_dir(self._artifacts, task.id) as folder:
                rewards = await self._work.grade(task, samples, timeout_s=limit_s, artifacts_dir=folder)
        except TimeoutError as error:
            text = f"the grader ran longer than grader_timeout_sec = {limit_s:g}; raise it or do less"
            return _failure(text, category_of(error), end=End.TIMEOUT, **ungraded)
        except (GraderError, EngineError) as error:
            return _failure(str(error), category_of(error), end=End.GRADER_ERROR, **ungraded)
        return _graded(samples, rewards)


def _graded(samples: dict[str, RolloutSample], rewards: list[Reward]) -> ExecutionResult:
    """The grader's result. Where it rewarded the whole rollout, samples without a reward of their own carry that."""
    whole = next((value for transcript, value, step in rewards if transcript is None and step is None), None)
    bare = () if whole is None else tuple(name for name, sample in samples.items() if sample.reward is None)
    for name in bare:
        samples[name].reward = whole
    steps = {step: value for _, value, step in rewards if step is not None}
    return ExecutionResult(status=RolloutStatus.SUCCESS, samples=samples, reward=whole, step_rewards=steps, filled=bare)


def _end_of(error: Exception) -> End:
    """How a rollout ends whose workflow failed with what `Work` raised."""
    return (
        End.TIMEOUT if isinstance(error, TimeoutError) else End.ENGINE_ERROR if isinstance(error, EngineError) else End.AGENT_ERROR
    )


def _failure(text: str, category: RolloutErrorCategory, **more: Any) -> ExecutionResult:
    return ExecutionResult(status=RolloutStatus.FAILURE, err_message=text, err_category=category, **more)


def _recorded(reply: object) -> dict[str, Transcript]:
    """What the controller recorded of the rollout, as far as it says so."""
    if not isinstance(reply, CompletionReply):
        return {}
    return {name: Transcript(each.messages, each.tools, tuple(each.steps)) for name, each in reply.transcripts.items()}


def _load(reference: Any) -> Any:
    """What `"module:attr"` stands for; anything but a string stands for itself."""
    if not isinstance(reference, str):
        return reference
    module, colon, attribute = reference.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"{reference!r} names nothing; write it as 'module:attribute'")
    loaded: Any = importlib.import_module(module)
    try:
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except AttributeError as cause:
        raise ImportError(f"module {module!r} has no {attribute!r}; name what it defines") from cause
    return cast(object, loaded)


def _file(workflow: type[Any]) -> str:
    try:
        return inspect.getfile(workflow)
    except (OSError, TypeError):  # made in a shell
        return str(Path.cwd() / "workflow.py")


def _environment() -> RolloutContext:
    found = own_rollout()
    if found is None:
        raise ConfigError("no rollout is running; enter a RolloutContext first, or start the program with `penstock run`")
    return RolloutContext(base_url=found.base_url, api_key=found.api_key, rollout_id=found.rollout_id)
