"""What a rollout server's callbacks mean to a controller: the error that an executor raises, or the rewards that it gives."""

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from penstock.config import Section, secret
from penstock.errors import ConfigError, EngineError, GraderError, WorkflowError
from penstock.http.listen import ANYWHERE, LOOPBACK
from penstock.records import End, Task
from penstock.rollout.author_tasks import one_line
from penstock.rollout.execution import Reward, WorkflowResult
from penstock.rollout.executors.base import Given, Session
from penstock.rollout.executors.server_callbacks import LINGER_S, Callbacks, PendingCallback
from penstock.rollout.executors.server_hosts import Host, ServerHosts
from penstock.rollout.server.protocol import (
    GraderCompleteRequest,
    GraderStatus,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutStatus,
    State,
)
from penstock.rollout.transcripts import Transcript
from penstock.sdk.context import finite_reward
from penstock.sdk.samples import RolloutSample

_BY_CATEGORY = {RolloutErrorCategory.TIMEOUT: End.TIMEOUT, RolloutErrorCategory.HTTP_ERROR: End.ENGINE_ERROR}


def workflow_failure(told: RolloutCompleteRequest) -> Exception:
    """The error of a workflow that failed."""
    end = _end_of(told)
    kind = TimeoutError if end is End.TIMEOUT else EngineError if end is End.ENGINE_ERROR else WorkflowError
    return kind(_words(told.err_message, "the rollout server says that the workflow failed, but not why"))


def grader_failure(told: GraderCompleteRequest) -> Exception:
    """The error of a grader that failed."""
    kind = TimeoutError if _end_of(told) is End.TIMEOUT else GraderError
    return kind(_words(told.err_message, "the rollout server says that the grader failed, but not why"))


def rewards_of(told: GraderCompleteRequest, samples: Mapping[str, RolloutSample]) -> list[Reward]:
    """In the order in which a grader here gives them; GraderError where there is none, or one for a step that never was."""
    known = {index for sample in samples.values() for index in sample.steps}
    steps = sorted((told.step_rewards or {}).items())
    if unknown := [step for step, _ in steps if step not in known]:
        raise GraderError(f"the rollout server rewards steps {unknown}; this rollout has {sorted(known)}")
    whole = [] if told.reward is None else [Reward(None, finite_reward(told.reward))]
    own = {name: each.reward for name, each in told.samples.items() if name not in (told.filled or ())}
    parts = [Reward(name, finite_reward(reward)) for name, reward in own.items() if reward is not None]
    rewards = [*whole, *parts, *(Reward(None, finite_reward(value), step) for step, value in steps)]
    if not rewards:
        raise GraderError("the rollout server gave no reward; call ctx.set_sample_reward for each, or ctx.set_reward once")
    return rewards


def _end_of(told: RolloutCompleteRequest | GraderCompleteRequest) -> End:
    """How the rollout ends: as the server says, else by the category, which every server tells."""
    return told.end or (_BY_CATEGORY.get(told.err_category, End.AGENT_ERROR) if told.err_category else End.AGENT_ERROR)


def _words(message: str | None, otherwise: str) -> str:
    return one_line(WorkflowError(message)) if message else otherwise


GRACE_S = 30.0
"""How much later than a deadline its server may say so: it tries a callback again several times."""
UNGRADED_S = 600.0
"""How long a rollout whose workflow has ended may wait to be graded; nobody asks for the grade of one without a call."""

T = TypeVar("T")


class ServerSection(Section):
    """`[executor]` for `executor = "server"`."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses of rollout servers with the same agent, such as `http://10.0.0.1:8000`; the least busy one gets a rollout."""
    token_env: str = ""
    """The environment variable that holds the servers' token; empty sends none."""
    callback_host: str = "127.0.0.1"
    """Where the servers' callbacks are listened for; loopback unless the servers are elsewhere."""
    callback_port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    callback_url: str = ""
    """How the servers reach that address, if by another one: behind a proxy, or where it is every interface."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_more(cls, urls: Any) -> Any:
        return (urls,) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(_address(url) for url in urls)
        if len(set(found)) < len(found):
            raise ValueError("an address stands there twice")
        return found

    @field_validator("callback_url")
    @classmethod
    def _callback_address(cls, url: str) -> str:
        return _address(url) if url else ""

    @field_validator("token_env")
    @classmethod
    def _token_is_there(cls, variable: str) -> str:
        if variable:
            try:
                secret(variable, "token_env")
            except ConfigError as cause:
                raise ValueError(f"the environment has no {variable}; set it to the servers' token") from cause
        return variable

    @model_validator(mode="after")
    def _can_be_called_back(self) -> Self:
        elsewhere = [url for url in self.urls if urlsplit(url).hostname not in LOOPBACK]
        if elsewhere and not self.callback_url and self.callback_host in LOOPBACK | ANYWHERE:
            text = f"{elsewhere[0]} cannot call back {self.callback_host or 'every interface'}"
            raise ValueError(f"{text}; set callback_host to an address of this machine that it reaches, or callback_url")
        return self


class Ungraded(NamedTuple):
    """A rollout that a server is grading, or has graded."""

    errand: PendingCallback
    host: Host
    expiry: asyncio.TimerHandle


class ServerExecutor:
    """The controller of one or more rollout servers."""

    def __init__(self, given: Given, *, grace_s: float = GRACE_S) -> None:
        if set_here := [f"[{name}]" for name, table in zip(("workflow", "grader"), given.agent.tables, strict=True) if table]:
            text = f"{' and '.join(set_here)} would change nothing: the agent runs on rollout servers, with its own file's config"
            raise ConfigError(f"{text}; set the fields there, or use another rollout.executor")
        self._given = given
        self._grace_s = grace_s
        section: ServerSection = given.section
        self._hosts = ServerHosts(section.urls, secret(section.token_env, "executor.token_env") if section.token_env else "")
        self._callbacks = Callbacks(
            self._recorded,
            host=section.callback_host,
            port=section.callback_port,
            url=section.callback_url,
            linger_s=min(grace_s, LINGER_S),
        )
        self._run = secrets.token_hex(4)
        self._ungraded: dict[str, Ungraded] = {}
        """Rollouts whose workflow has ended."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._hosts)
            await stack.enter_async_context(self._callbacks)
            ailing = await self._hosts.ailing()
            if len(ailing) == len(self._given.section.urls):
                raise ConfigError(f"executor.urls: no rollout server can be used: {'; '.join(ailing.values())}")
            for url, why in ailing.items():
                self._given.events.emit("executor.server_down", url=url, message=why)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in tuple(self._ungraded):
            self._forget(name)
        await self._stack.aclose()

    async def run(self, task: Task, session: Session, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        """See `Executor.run`. What the agents told of themselves stays on the server, where its grader sees it."""
        name = self._name(rollout_id)
        body = self._body(task, session, name, timeout_s)
        errand, host = self._callbacks.expect(name), None
        try:
            host = await self._hosts.place(body, name, errand.completed, patience_s=timeout_s)
            told = await self._ended(errand, host, name, timeout_s)
        except BaseException:
            self._callbacks.forget(name, owed=host is not None and not errand.graded.done())
            raise
        expiry = asyncio.get_running_loop().call_later(UNGRADED_S, self._forget, name)
        self._ungraded[name] = Ungraded(errand, host, expiry)
        return WorkflowResult({}, tuple(told.strays or ()))

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        """See `Executor.grade`. The server has graded its own samples, or is about to."""
        name = self._name(rollout_id)
        if name not in self._ungraded:
            raise GraderError(f"rollout {rollout_id} is on no rollout server; grade it once, after its workflow has ended there")
        errand, host, _ = self._ungraded[name]
        try:
            told = await self._awaited(errand.graded, host, name, timeout_s, GraderError)
        finally:
            self._forget(name)
            if not errand.graded.done():
                await self._hosts.cancel(host, name)
        if told.status is not GraderStatus.SUCCESS:
            raise grader_failure(told)
        return rewards_of(told, samples)

    def _name(self, rollout_id: str) -> str:
        """What servers call a rollout. Other runs have rollouts of the same ids, and a server may run those too."""
        return f"{rollout_id}~{self._run}"

    async def _recorded(self, name: str) -> dict[str, Transcript]:
        return await self._given.recorded(name.removesuffix(f"~{self._run}"))

    async def _ended(self, errand: PendingCallback, host: Host, name: str, timeout_s: float) -> RolloutCompleteRequest:
        try:
            told = await self._awaited(errand.completed, host, name, timeout_s, WorkflowError)
        finally:
            self._hosts.give_back(host)
            if not errand.completed.done():
                await self._hosts.cancel(host, name)
        if told.status is not RolloutStatus.SUCCESS:
            raise workflow_failure(told)
        return told

    def _body(self, task: Task, session: Session, name: str, timeout_s: float) -> bytes:
        urls = self._callbacks.urls(name)
        request = RolloutInitRequest(
            rollout_id=name,
            initial_messages=list(task.prompt),
            chat_completions_url=session.base_url,
            completion_callback_url=urls.completed,
            grader_callback_url=urls.graded,
            controller_api_key=self._callbacks.key,
            llm_api_key=session.token,
            label=task.label,
            metadata=task.metadata,
            agent_timeout_sec=timeout_s,
            grader_timeout_sec=self._given.grader_timeout_s,
        )
        try:
            return json.dumps(request.model_dump(exclude_none=True), allow_nan=False).encode()
        except (TypeError, ValueError) as cause:
            raise WorkflowError(f"task {task.id} cannot be sent to a rollout server as JSON: {cause}") from cause

    async def _awaited(
        self, future: "asyncio.Future[T]", host: Host, name: str, timeout_s: float, error: type[WorkflowError | GraderError]
    ) -> T:
        """What a server calls back with. One that is silent past the deadline is asked why: it may have others to do first."""
        limit_s, seen_at_work = timeout_s + self._grace_s, False
        working = State.RUNNING if error is WorkflowError else State.GRADING
        while True:
            await asyncio.wait({future}, timeout=limit_s)
            if future.done():
                return future.result()
            state, words = await self._hosts.standing(host, name)
            if state is State.QUEUED or (state is working and not seen_at_work):
                seen_at_work = state is working
                continue
            if state is working:
                raise TimeoutError(f"{host.url} did not end rollout {name} in time")
            said = words if state is State.UNKNOWN else f"it says {state.value!r}; does it reach {self._callbacks.url}?"
            raise error(f"the rollout server said nothing of rollout {name} for {limit_s:g} s; asked, {said}")

    def _forget(self, name: str) -> None:
        ungraded = self._ungraded.pop(name)
        ungraded.expiry.cancel()
        self._callbacks.forget(name, owed=not ungraded.errand.graded.done())


def _address(url: str) -> str:
    """`url` without a slash at its end; ValueError where it is not one of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an address; write it as http://host:port")
    if parts.username or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: leave out what is not host, port and path")
    return url.rstrip("/")
