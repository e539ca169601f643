"""Back ends of the rollout server: the interface, the one that runs the agent in this process, and the checks before it runs."""

import importlib
import inspect
import logging
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
from penstock.errors import ConfigError, EngineError, GraderError, WorkerLost, WorkflowError, one_line
from penstock.events import Events
from penstock.records import End, Message, Task
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import ScratchFolders, artifacts_dir
from penstock.rollout.in_process import InProcessAgent, Reward, WorkflowResult, collect_samples
from penstock.rollout.runner import no_call_message
from penstock.rollout.transcripts import Transcript, make_samples, misreported, unrecorded_samples
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import MAIN, RolloutContext, get_rollout_context, outside_rollouts
from penstock.sdk.samples import RolloutSample
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, Grader, GraderConfig
from penstock.system.async_tools import leaf_errors
from penstock_compat.rollout_server.protocol import CompletionReply, RolloutErrorCategory, RolloutStatus, Seconds, Segment

ARTIFACTS = Path(".penstock/artifacts")
DEADLINE_S = 3600.0
"""For a request that sets none."""
NO_RECORD = (
    "the controller's record of the rollout did not arrive, or was too long, so there is nothing to grade; use shorter rollouts"
)
COLLECT_S = 5.0
"""How long the agents of a failed workflow may take to report their conversations."""


class ExecutionRequest(BaseModel):
    """One rollout to run."""

    id: Segment
    prompt: list[dict[str, Any]]
    label: str | None = None
    metadata: dict[str, Any] | None = None
    agent_timeout_sec: Seconds | None = None
    grader_timeout_sec: Seconds | None = None
    records: bool = False
    """Whether the controller says what it recorded; the agents' own samples are not graded then."""


@dataclass(kw_only=True)
class ExecutionResult:
    """How a workflow or a grader ended. A failed one may have samples too."""

    status: RolloutStatus
    samples: dict[str, RolloutSample] = field(default_factory=dict[str, RolloutSample])
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    direct_calls: tuple[str, ...] = ()
    """Model providers that the workflow called directly."""
    returned: list[Message] | None = None
    """Messages that the workflow returned; they are sample `main` where no agent reports any."""
    reward: float | None = None
    """The reward of the whole rollout, if its grader gave one."""
    step_rewards: dict[int, float] = field(default_factory=dict[int, float])
    """By the index of the call."""
    components: dict[str, float] = field(default_factory=dict[str, float])
    """Named parts of `reward`."""
    filled: tuple[str, ...] = ()
    """Samples that carry the whole rollout's reward because they have none of their own."""
    misreported: tuple[str, ...] = ()
    """Samples whose agents reported another conversation than was sampled; the grader saw the recorded one."""
    end: End | None = None
    """How a failed rollout ends, if that is known better than by the category."""


log = logging.getLogger(__name__)

WorkflowComplete = Callable[[ExecutionResult], Awaitable[Any]]
"""Called when the workflow has ended; returns the controller's CompletionReply, or None."""
GraderComplete = Callable[[ExecutionResult], Awaitable[Any]]


class ExecutionBackend(ABC):
    """Runs rollouts. The server enters a rollout's RolloutContext before it calls `execute`."""

    @abstractmethod
    async def execute(
        self, request: ExecutionRequest, on_workflow_complete: WorkflowComplete, on_grader_complete: GraderComplete | None = None
    ) -> None:
        """Runs the workflow and calls `on_workflow_complete` once; then grades it and calls `on_grader_complete` once, if given."""

    @property
    def max_concurrency(self) -> int:
        """How many workflows may run at once; 0 is any number."""
        return 0

    def health(self) -> dict[str, Any]:
        return {"status": "ok"}


class LocalBackend(ExecutionBackend):
    """Runs a workflow and its grader in this process; each is a class or config, or `"module:attr"`.

    `context` makes the RolloutContext of a rollout that is executed outside of any; by default it is read from the environment
    that `penstock run` sets. Workflows and graders have separate slots, as their configs say: a grader delays no workflow.
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
        self._context = context or _context_from_environment
        self._artifacts = artifacts
        self._scratch = ScratchFolders(events)
        events = events or Events()
        events.listen(_log_block)
        self._author_tasks = AuthorTasks(agent.entry.parent, events, grace_s=grace_s)
        self._runner = InProcessAgent(agent, self._author_tasks)

    @property
    def max_concurrency(self) -> int:
        return self._runner.workflow_slots.limit or 0

    def health(self) -> dict[str, Any]:
        slots = self._runner.workflow_slots
        counts = {"max_concurrent": slots.limit, "queued": slots.queued, "running": slots.running}
        return {"status": "ok", "concurrency": counts}

    async def execute(
        self, request: ExecutionRequest, on_workflow_complete: WorkflowComplete, on_grader_complete: GraderComplete | None = None
    ) -> None:
        """See `ExecutionBackend`. The grader sees the recorded transcripts if the reply to the completion has them."""
        context = get_rollout_context() or self._context()
        task = Task(id=request.id, prompt=tuple(request.prompt), label=request.label, metadata=request.metadata)
        result = await self._run(task, context, request.agent_timeout_sec or DEADLINE_S)
        reply = await on_workflow_complete(result)
        if on_grader_complete is None:
            return
        recorded = _recorded(reply)
        if result.status is RolloutStatus.SUCCESS and request.records and recorded is None:
            result = _failure(NO_RECORD, RolloutErrorCategory.VALIDATION_ERROR, end=End.GRADER_ERROR)
        elif result.status is RolloutStatus.SUCCESS:
            result = await self._grade(task, result, recorded, request.grader_timeout_sec or DEADLINE_S)
        await on_grader_complete(result)

    async def _run(self, task: Task, context: RolloutContext, limit_s: float) -> ExecutionResult:
        try:
            async with self._scratch.folder_for(self._artifacts and self._artifacts / task.id) as folder:
                result = await self._runner.run(task, context, timeout_s=limit_s, artifacts_dir=folder)
        except TimeoutError as error:
            text = f"the workflow ran longer than agent_timeout_sec = {limit_s:g}; raise it or do less"
            return await self._failed(error, text, context)
        except (WorkflowError, EngineError, WorkerLost) as error:
            return await self._failed(error, str(error), context)
        claims = result.samples or ({MAIN: result.returned} if result.returned else {})
        return ExecutionResult(
            status=RolloutStatus.SUCCESS,
            samples=unrecorded_samples(claims),
            direct_calls=result.direct_calls,
            returned=result.returned,
        )

    async def _failed(self, error: Exception, text: str, context: RolloutContext) -> ExecutionResult:
        """Returns a failed workflow's result, with the conversations of its agents up to then."""
        direct_calls = tuple(sorted(context.direct_calls))
        try:
            messages = await self._author_tasks.run(
                collect_samples(context), error=WorkflowError, what="the samples", timeout_s=COLLECT_S
            )
        except (TimeoutError, WorkflowError, EngineError):
            messages = {}
        category, end = category_of(error, context.base_url), _end_of(error)
        return _failure(text, category, samples=unrecorded_samples(messages), direct_calls=direct_calls, end=end)

    async def _grade(
        self, task: Task, result: ExecutionResult, recorded: Mapping[str, Transcript] | None, limit_s: float
    ) -> ExecutionResult:
        claims = {name: sample.messages for name, sample in result.samples.items()}
        reported = {} if list(claims.values()) == [result.returned] else claims
        samples = unrecorded_samples(claims) if recorded is None else make_samples(recorded, reported, result.returned)
        ungraded = {"samples": unrecorded_samples({name: sample.messages for name, sample in samples.items()})}
        if not samples or recorded == {}:
            return _failure(no_call_message(WorkflowResult({}, result.direct_calls)), RolloutErrorCategory.VALIDATION_ERROR)
        try:
            with outside_rollouts(), artifacts_dir(self._artifacts, task.id) as folder:
                rewards = await self._runner.grade(task, samples, timeout_s=limit_s, artifacts_dir=folder)
        except TimeoutError as error:
            text = f"the grader ran longer than grader_timeout_sec = {limit_s:g}; raise it or do less"
            return _failure(text, category_of(error), end=End.TIMEOUT, **ungraded)
        except (GraderError, EngineError) as error:
            return _failure(str(error), category_of(error), end=End.GRADER_ERROR, **ungraded)
        return _graded(samples, rewards, misreported(samples, reported))


def _log_block(kind: str, fields: dict[str, Any]) -> None:
    if kind == "loop.blocked":
        log.warning(fields["text"])


def _graded(samples: dict[str, RolloutSample], rewards: list[Reward], misreported: list[str]) -> ExecutionResult:
    """Returns the grader's result. A reward of the whole rollout goes to samples without a reward of their own too."""
    own = next((each for each in rewards if each.transcript is None and each.step is None), None)
    whole = None if own is None else own.value
    filled = () if whole is None else tuple(name for name, sample in samples.items() if sample.reward is None)
    for name in filled:
        samples[name].reward = whole
    steps = {each.step: each.value for each in rewards if each.step is not None}
    return ExecutionResult(
        status=RolloutStatus.SUCCESS,
        samples=samples,
        reward=whole,
        step_rewards=steps,
        components={} if own is None else own.components,
        filled=filled,
        misreported=tuple(misreported),
    )


def _end_of(error: Exception) -> End:
    return (
        End.TIMEOUT if isinstance(error, TimeoutError) else End.ENGINE_ERROR if isinstance(error, EngineError) else End.AGENT_ERROR
    )


def _failure(text: str, category: RolloutErrorCategory, **more: Any) -> ExecutionResult:
    return ExecutionResult(status=RolloutStatus.FAILURE, err_message=text, err_category=category, **more)


def _recorded(reply: object) -> dict[str, Transcript] | None:
    """Returns the recorded transcripts; None of a controller that does not send them, as other implementations do not."""
    if not isinstance(reply, CompletionReply) or "transcripts" not in reply.model_fields_set:
        return None
    return {name: Transcript(e.messages, e.tools, tuple(e.steps), e.replies) for name, e in reply.transcripts.items()}


def _load(reference: Any) -> Any:
    """Imports what `"module:attr"` names; anything but a string is returned as it is."""
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


def _context_from_environment() -> RolloutContext:
    rollout = enclosing_rollout()
    if rollout is None:
        raise ConfigError("no rollout is running; enter a RolloutContext first, or start the program with `penstock run`")
    return RolloutContext(base_url=rollout.base_url, api_key=rollout.api_key, rollout_id=rollout.rollout_id)


# Validation

MAX_NAME_CHARS = 256


class BackendProblem(NamedTuple):
    """One reason why a workflow or grader cannot be run."""

    code: str
    message: str


def validate_backend(
    workflow_cls: Any, workflow_config: Any = None, grader_cls: Any = None, grader_config: Any = None
) -> list[BackendProblem]:
    """Returns the reasons why these cannot be run."""
    return [*_check_workflow(workflow_cls, workflow_config), *_check_grader(grader_cls, grader_config)]


def _check_workflow(cls: Any, config: Any) -> Iterator[BackendProblem]:
    if not _derives(cls, AgentWorkflow):
        yield BackendProblem("INVALID_WORKFLOW_CLASS", f"{_name(cls)} is no AgentWorkflow; give a class that derives from it")
        return
    if not _is_async(cls, "run"):
        yield BackendProblem("WORKFLOW_RUN_NOT_ASYNC", f"{_name(cls)}.run is not async; write `async def run(self, ctx)`")
    if failure := _init_failure(cls, config):
        yield BackendProblem("WORKFLOW_INIT_FAILED", f"{_name(cls)} cannot be made with its config: {failure}")
    name = getattr(config, "name", None) if config is not None else cls.__name__
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        length = f"has {len(name)} characters" if isinstance(name, str) else f"is {type(name).__name__}, no string"
        yield BackendProblem("INVALID_AGENT_NAME", f"the workflow's name {length}; use 1 to {MAX_NAME_CHARS} characters")


def _check_grader(cls: Any, config: Any) -> Iterator[BackendProblem]:
    if cls is None:
        yield BackendProblem("MISSING_GRADER", "there is no grader; define a concrete Grader subclass next to the workflow")
        return
    if not _derives(cls, Grader):
        yield BackendProblem("INVALID_GRADER_CLASS", f"{_name(cls)} is no Grader; give a class that derives from it")
        return
    if not _is_async(cls, "grade"):
        yield BackendProblem("GRADER_GRADE_NOT_ASYNC", f"{_name(cls)}.grade is not async; write `async def grade(self, ctx)`")
    if failure := _init_failure(cls, config):
        yield BackendProblem("GRADER_INIT_FAILED", f"{_name(cls)} cannot be made with its config: {failure}")


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


# Error categories

HTTP_ERRORS = {
    ("aiohttp", "ClientError"),
    ("anthropic", "APIError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("openai", "APIError"),
    ("requests", "RequestException"),
}
"""Package and base class of HTTP clients' errors; compared by name, so that nothing is imported."""

VALIDATION_ERRORS = (ValueError, TypeError, AssertionError, GraderError, ConfigError)

_MAX_CHAIN = 16


def category_of(error: BaseException, policy_url: str | None = None) -> RolloutErrorCategory:
    """Returns the protocol's category of an error that `InProcessAgent` raised.

    With `policy_url`, an HTTP error in the chain of causes decides, unless the request went to another host.
    """
    if isinstance(error, TimeoutError):
        return RolloutErrorCategory.TIMEOUT
    if isinstance(error, EngineError):
        return RolloutErrorCategory.HTTP_ERROR
    first = next(leaf_errors(error.__cause__)) if error.__cause__ is not None else error
    if policy_url is not None and any(_is_http(each) and _is_from(each, policy_url) for each in _chain(first)):
        return RolloutErrorCategory.HTTP_ERROR
    if isinstance(first, TimeoutError):
        return RolloutErrorCategory.TIMEOUT
    return RolloutErrorCategory.VALIDATION_ERROR if isinstance(first, VALIDATION_ERRORS) else RolloutErrorCategory.AGENT_ERROR


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes, through exception groups too."""
    waiting: list[BaseException] = [error]
    for _ in range(_MAX_CHAIN):
        if not waiting:
            return
        for leaf in leaf_errors(waiting.pop(0)):
            yield leaf
            cause = leaf.__cause__ or (None if leaf.__suppress_context__ else leaf.__context__)
            if cause is not None:
                waiting.append(cause)


def _is_http(error: BaseException) -> bool:
    return any((cls.__module__.partition(".")[0], cls.__name__) in HTTP_ERRORS for cls in type(error).__mro__)


def _is_from(error: BaseException, policy_url: str) -> bool:
    """Returns whether the failed request went to the policy; True if the error does not say."""
    for attribute in ("request.url", "request_info.real_url"):
        with suppress(Exception):  # another package's attributes: absent, or properties that raise
            return _address(str(attrgetter(attribute)(error))) == _address(policy_url)
    with suppress(Exception):
        host, port = attrgetter("host", "port")(error)
        return (host, port) == _address(policy_url)
    return True


def _address(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
