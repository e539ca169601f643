"""Whose fault a failure was: an error of the author's code to one of the protocol's four categories."""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from pydantic import BaseModel

from penstock.config import enclosing_rollout
from penstock.errors import ConfigError, EngineError, GraderError, WorkflowError
from penstock.events import Events
from penstock.records import End, Task
from penstock.rollout.author_tasks import AuthorTasks, leaves, one_line
from penstock.rollout.execution import Reward, Work, WorkflowResult, told_samples
from penstock.rollout.executors.base import artifacts_dir
from penstock.rollout.runner import no_call
from penstock.rollout.server.protocol import CompletionReply, RolloutErrorCategory, RolloutStatus, Seconds, Segment
from penstock.rollout.transcripts import Transcript, make_samples
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import RolloutContext, get_rollout_context, outside_rollouts
from penstock.sdk.samples import RolloutSample
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig

HTTP_ERRORS = {
    ("aiohttp", "ClientError"),
    ("anthropic", "APIError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("openai", "APIError"),
    ("requests", "RequestException"),
}
"""Package and class from which a client's errors of status and connection descend; told by name, so that nothing is imported."""

MISUSE = (ValueError, TypeError, AssertionError, GraderError, ConfigError)

_LONGEST_CHAIN = 16


def category_of(error: BaseException, policy_url: str | None = None) -> RolloutErrorCategory:
    """The category of what `Work` raised. With `policy_url`, an HTTP error that led to it counts unless it was another host's."""
    if isinstance(error, TimeoutError):
        return RolloutErrorCategory.TIMEOUT
    if isinstance(error, EngineError):
        return RolloutErrorCategory.HTTP_ERROR
    first = next(leaves(error.__cause__)) if error.__cause__ is not None else error
    if policy_url is not None and any(_is_http(each) and _is_from(each, policy_url) for each in _chain(first)):
        return RolloutErrorCategory.HTTP_ERROR
    if isinstance(first, TimeoutError):
        return RolloutErrorCategory.TIMEOUT
    return RolloutErrorCategory.VALIDATION_ERROR if isinstance(first, MISUSE) else RolloutErrorCategory.AGENT_ERROR


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, through groups too."""
    waiting: list[BaseException] = [error]
    for _ in range(_LONGEST_CHAIN):
        if not waiting:
            return
        for leaf in leaves(waiting.pop(0)):
            yield leaf
            before = leaf.__cause__ or (None if leaf.__suppress_context__ else leaf.__context__)
            if before is not None:
                waiting.append(before)


def _is_http(error: BaseException) -> bool:
    return any((cls.__module__.partition(".")[0], cls.__name__) in HTTP_ERRORS for cls in type(error).__mro__)


def _is_from(error: BaseException, policy_url: str) -> bool:
    """Whether the request that failed went to the policy; also where the error does not say where it went."""
    for place in ("request.url", "request_info.real_url"):
        with suppress(Exception):  # another package's attributes: absent, or properties that raise
            return _address(str(attrgetter(place)(error))) == _address(policy_url)
    with suppress(Exception):
        host, port = attrgetter("host", "port")(error)
        return (host, port) == _address(policy_url)
    return True


def _address(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


LONGEST_NAME = 256


class Problem(NamedTuple):
    """One thing that is wrong."""

    code: str
    message: str


def validate_backend(
    workflow_cls: Any, workflow_config: Any = None, grader_cls: Any = None, grader_config: Any = None
) -> list[Problem]:
    """What keeps these from being run; empty where nothing does."""
    return [*_workflow(workflow_cls, workflow_config), *_grader(grader_cls, grader_config)]


def _workflow(cls: Any, config: Any) -> Iterator[Problem]:
    if not _derives(cls, AgentWorkflow):
        yield Problem("INVALID_WORKFLOW_CLASS", f"{_name(cls)} is no AgentWorkflow; give a class that derives from it")
        return
    if not _is_async(cls, "run"):
        yield Problem("WORKFLOW_RUN_NOT_ASYNC", f"{_name(cls)}.run is not async; write `async def run(self, ctx)`")
    if failure := _init_failure(cls, config):
        yield Problem("WORKFLOW_INIT_FAILED", f"{_name(cls)} cannot be made with its config: {failure}")
    name = getattr(config, "name", None) if config is not None else cls.__name__
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
        length = f"has {len(name)} characters" if isinstance(name, str) else f"is {type(name).__name__}, no string"
        yield Problem("INVALID_AGENT_NAME", f"the workflow's name {length}; use 1 to {LONGEST_NAME} characters")


def _grader(cls: Any, config: Any) -> Iterator[Problem]:
    if cls is None:
        yield Problem("MISSING_GRADER", "there is no grader; define a concrete Grader subclass next to the workflow")
        return
    if not _derives(cls, Grader):
        yield Problem("INVALID_GRADER_CLASS", f"{_name(cls)} is no Grader; give a class that derives from it")
        return
    if not _is_async(cls, "grade"):
        yield Problem("GRADER_GRADE_NOT_ASYNC", f"{_name(cls)}.grade is not async; write `async def grade(self, ctx)`")
    if failure := _init_failure(cls, config):
        yield Problem("GRADER_INIT_FAILED", f"{_name(cls)} cannot be made with its config: {failure}")


def _derives(cls: Any, base: type[Any]) -> bool:
    return inspect.isclass(cls) and issubclass(cls, base)


def _is_async(cls: type[Any], method: str) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(getattr(cls, method)))


def _init_failure(cls: type[Any], config: Any) -> str:
    try:
        cls(config)
    except Exception as cause:  # the author's code: anything may come
        return one_line(cause)
    return ""


def _name(cls: Any) -> str:
    return cls.__name__ if inspect.isclass(cls) else repr(cls)[:80]


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
        self._guests = AuthorTasks(agent.entry.parent, events or Events(), grace_s=grace_s)
        self._work = Work(agent, self._guests)

    @property
    def max_concurrency(self) -> int:
        return self._work.workflow_slots.limit or 0

    def health(self) -> dict[str, Any]:
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
            return _failure(no_call(WorkflowResult({}, result.strays)), RolloutErrorCategory.VALIDATION_ERROR)
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
    found = enclosing_rollout()
    if found is None:
        raise ConfigError("no rollout is running; enter a RolloutContext first, or start the program with `penstock run`")
    return RolloutContext(base_url=found.base_url, api_key=found.api_key, rollout_id=found.rollout_id)
