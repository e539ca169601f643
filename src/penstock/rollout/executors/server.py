"""Runs workflows and graders on rollout servers, over HTTP: the agent's folder, packages and files live there, not here."""

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
from penstock.errors import ConfigError, GraderError, WorkflowError
from penstock.http.listen import ANYWHERE, LOOPBACK
from penstock.records import Task
from penstock.rollout.executors.answers import grader_failure, rewards_of, workflow_failure
from penstock.rollout.executors.base import Given, Session
from penstock.rollout.executors.callbacks import LINGER_S, Callbacks, Errand
from penstock.rollout.executors.hosts import Host, Hosts
from penstock.rollout.server.wire import GraderStatus, RolloutCompleteRequest, RolloutInitRequest, RolloutStatus, State
from penstock.rollout.transcripts import Transcript
from penstock.rollout.work import Reward, Told
from penstock.sdk.samples import RolloutSample

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

    errand: Errand
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
        self._hosts = Hosts(section.urls, secret(section.token_env, "executor.token_env") if section.token_env else "")
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

    async def run(self, task: Task, session: Session, *, rollout_id: str, timeout_s: float) -> Told:
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
        return Told({}, tuple(told.strays or ()))

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

    async def _ended(self, errand: Errand, host: Host, name: str, timeout_s: float) -> RolloutCompleteRequest:
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
