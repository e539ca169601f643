"""Runs workflows and graders on rollout servers: starts each rollout with `POST /rollout` and waits for the server's callbacks."""

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
from penstock.errors import ConfigError, EngineError, GraderError, WorkflowError, one_line
from penstock.http.listen import ANYWHERE, LOOPBACK
from penstock.records import End, Task
from penstock.rollout.executors.base import Executor, ExecutorContext, GatewaySession
from penstock.rollout.in_process import Reward, WorkflowResult
from penstock.rollout.transcripts import Transcript
from penstock.sdk.context import finite_reward
from penstock.sdk.samples import RolloutSample
from penstock_compat.rollout_server.executor_callbacks import LINGER_S, CallbackListener, PendingCallbacks
from penstock_compat.rollout_server.executor_hosts import Host, ServerHosts
from penstock_compat.rollout_server.protocol import (
    GraderCompleteRequest,
    GraderStatus,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutState,
    RolloutStatus,
)

GRACE_S = 30.0
"""How long after a deadline a callback may still come: a server tries it several times."""
GRADE_WAIT_S = 600.0
"""How long a rollout whose workflow has ended is kept for `grade`, which is never called for one without a model call."""

T = TypeVar("T")


class ServerSection(Section):
    """`[executor]` for `executor = "server"`."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses of rollout servers with the same agent, such as `http://10.0.0.1:8000`; a rollout goes to the least busy one."""
    token_env: str = ""
    """The environment variable that holds the servers' token; empty sends none."""
    callback_host: str = "127.0.0.1"
    """The address to listen on for callbacks; loopback unless the servers run on other machines."""
    callback_port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    callback_url: str = ""
    """The address under which servers reach the listener, if another: behind a proxy, or if it listens on every interface."""

    @field_validator("urls", mode="before")
    @classmethod
    def _as_tuple(cls, urls: Any) -> Any:
        return (urls,) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        addresses = tuple(_address(url) for url in urls)
        if len(set(addresses)) < len(addresses):
            raise ValueError("an address stands there twice")
        return addresses

    @field_validator("callback_url")
    @classmethod
    def _check_callback_url(cls, url: str) -> str:
        return _address(url) if url else ""

    @field_validator("token_env")
    @classmethod
    def _check_token(cls, variable: str) -> str:
        if variable:
            try:
                secret(variable, "token_env")
            except ConfigError as cause:
                raise ValueError(f"the environment has no {variable}; set it to the servers' token") from cause
        return variable

    @model_validator(mode="after")
    def _check_reachable(self) -> Self:
        remote = [url for url in self.urls if urlsplit(url).hostname not in LOOPBACK]
        if remote and not self.callback_url and self.callback_host in LOOPBACK | ANYWHERE:
            text = f"{remote[0]} cannot call back {self.callback_host or 'every interface'}"
            raise ValueError(f"{text}; set callback_host to an address of this machine that it reaches, or callback_url")
        return self


class PendingGrade(NamedTuple):
    """A rollout whose workflow has ended; its server grades it, or has done so."""

    pending: PendingCallbacks
    host: Host
    expiry: asyncio.TimerHandle


class ServerExecutor(Executor):
    """The controller of one or more rollout servers."""

    section = ServerSection
    runs_elsewhere = True

    def __init__(self, context: ExecutorContext, *, grace_s: float = GRACE_S) -> None:
        if set_here := [f"[{name}]" for name, table in zip(("workflow", "grader"), context.agent.tables, strict=True) if table]:
            text = f"{' and '.join(set_here)} would change nothing: the agent runs on rollout servers, with its own file's config"
            raise ConfigError(f"{text}; set the fields there, or use another rollout.executor")
        self._context = context
        self._grace_s = grace_s
        section: ServerSection = context.section
        self._hosts = ServerHosts(section.urls, secret(section.token_env, "executor.token_env") if section.token_env else "")
        self._callbacks = CallbackListener(
            self._load_transcripts,
            host=section.callback_host,
            port=section.callback_port,
            url=section.callback_url,
            linger_s=min(grace_s, LINGER_S),
        )
        self._run_suffix = f"~{secrets.token_hex(4)}"
        """Added to rollout ids: other runs have rollouts of the same ids, and may use the same servers."""
        self._pending_grades: dict[str, PendingGrade] = {}
        """By the rollout's id on its server."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._hosts)
            await stack.enter_async_context(self._callbacks)
            unusable = await self._hosts.unusable()
            if len(unusable) == len(self._context.section.urls):
                raise ConfigError(f"executor.urls: no rollout server can be used: {'; '.join(unusable.values())}")
            for url, why in unusable.items():
                self._context.events.emit("executor.server_down", url=url, message=why)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for server_id in tuple(self._pending_grades):
            self._forget(server_id)
        await self._stack.aclose()

    async def run(self, task: Task, session: GatewaySession, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        """See `Executor.run`. The agents' own samples stay on the server, where its grader sees them."""
        server_id = rollout_id + self._run_suffix
        pending, host = self._callbacks.expect(server_id), None

        def make_body(separate_keys: bool) -> bytes:
            pending.key = self._callbacks.key if separate_keys else session.token
            return self._request_body(task, session, server_id, timeout_s, pending.key)

        try:
            host = await self._hosts.submit(make_body, server_id, pending.completed, limit_s=timeout_s)
            result = await self._wait_for_workflow(pending, host, server_id, timeout_s)
        except BaseException:
            self._callbacks.forget(server_id, expect_more=host is not None and not pending.graded.done())
            raise
        expiry = asyncio.get_running_loop().call_later(GRADE_WAIT_S, self._forget, server_id)
        self._pending_grades[server_id] = PendingGrade(pending, host, expiry)
        return WorkflowResult({}, tuple(result.strays or ()))

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        """See `Executor.grade`. Waits for the grade: the server grades its own samples without being asked."""
        server_id = rollout_id + self._run_suffix
        if server_id not in self._pending_grades:
            raise GraderError(f"rollout {rollout_id} is on no rollout server; grade it once, after its workflow has ended there")
        pending, host, _ = self._pending_grades[server_id]
        try:
            result = await self._wait_for_callback(pending.graded, host, server_id, timeout_s, GraderError)
        finally:
            self._forget(server_id)
            if not pending.graded.done():
                await self._hosts.cancel(host, server_id)
        if result.status is not GraderStatus.SUCCESS:
            raise grader_failure(result)
        if result.misreported:
            self._context.events.emit("rollout.misreported", rollout_id=rollout_id, transcripts=result.misreported)
        return read_rewards(result, samples)

    async def _load_transcripts(self, server_id: str) -> dict[str, Transcript]:
        return await self._context.load_transcripts(server_id.removesuffix(self._run_suffix))

    async def _wait_for_workflow(
        self, pending: PendingCallbacks, host: Host, server_id: str, timeout_s: float
    ) -> RolloutCompleteRequest:
        try:
            result = await self._wait_for_callback(pending.completed, host, server_id, timeout_s, WorkflowError)
        finally:
            self._hosts.release(host)
            if not pending.completed.done():
                await self._hosts.cancel(host, server_id)
        if result.status is not RolloutStatus.SUCCESS:
            raise workflow_failure(result)
        return result

    def _request_body(self, task: Task, session: GatewaySession, server_id: str, timeout_s: float, key: str) -> bytes:
        urls = self._callbacks.urls(server_id)
        request = RolloutInitRequest(
            rollout_id=server_id,
            initial_messages=list(task.prompt),
            chat_completions_url=session.base_url,
            completion_callback_url=urls.completed,
            grader_callback_url=urls.graded,
            controller_api_key=key,
            llm_api_key=session.token,
            label=task.label,
            metadata=task.metadata,
            agent_timeout_sec=timeout_s,
            grader_timeout_sec=self._context.grader_timeout_s,
            records=True,
        )
        try:
            return json.dumps(request.model_dump(exclude_none=True), allow_nan=False).encode()
        except (TypeError, ValueError) as cause:
            raise WorkflowError(f"task {task.id} cannot be sent to a rollout server as JSON: {cause}") from cause

    async def _wait_for_callback(
        self, future: "asyncio.Future[T]", host: Host, server_id: str, timeout_s: float, error: type[WorkflowError | GraderError]
    ) -> T:
        """Returns the callback's body. A server that is silent past the deadline is asked for the state of the rollout.

        If it is queued, or runs for the first time, the wait starts again: its deadline counts from when it starts.
        """
        limit_s, seen_working = timeout_s + self._grace_s, False
        working = RolloutState.RUNNING if error is WorkflowError else RolloutState.GRADING
        while True:
            await asyncio.wait({future}, timeout=limit_s)
            if future.done():
                return future.result()
            state, message = await self._hosts.status(host, server_id)
            if state is RolloutState.QUEUED or (state is working and not seen_working):
                seen_working = state is working
                continue
            if state is working:
                raise TimeoutError(f"{host.url} did not end rollout {server_id} in time")
            reply = message if state is RolloutState.UNKNOWN else f"it says {state.value!r}; does it reach {self._callbacks.url}?"
            raise error(f"the rollout server said nothing of rollout {server_id} for {limit_s:g} s; asked, {reply}")

    def _forget(self, server_id: str) -> None:
        grade = self._pending_grades.pop(server_id)
        grade.expiry.cancel()
        self._callbacks.forget(server_id, expect_more=not grade.pending.graded.done())


_END_BY_CATEGORY = {RolloutErrorCategory.TIMEOUT: End.TIMEOUT, RolloutErrorCategory.HTTP_ERROR: End.ENGINE_ERROR}


def workflow_failure(result: RolloutCompleteRequest) -> Exception:
    """Returns the error to raise for a workflow that failed."""
    end = _end_of(result)
    kind = TimeoutError if end is End.TIMEOUT else EngineError if end is End.ENGINE_ERROR else WorkflowError
    return kind(_message(result.err_message, "the rollout server says that the workflow failed, but not why"))


def grader_failure(result: GraderCompleteRequest) -> Exception:
    """Returns the error to raise for a grader that failed."""
    kind = TimeoutError if _end_of(result) is End.TIMEOUT else GraderError
    return kind(_message(result.err_message, "the rollout server says that the grader failed, but not why"))


def read_rewards(result: GraderCompleteRequest, samples: Mapping[str, RolloutSample]) -> list[Reward]:
    """Returns the rewards in the order that a local grader gives. Raises GraderError if there is none, or for an unknown step."""
    known = {index for sample in samples.values() for index in sample.steps}
    steps = sorted((result.step_rewards or {}).items())
    if unknown := [step for step, _ in steps if step not in known]:
        raise GraderError(f"the rollout server rewards steps {unknown}; this rollout has {sorted(known)}")
    whole = [] if result.reward is None else [Reward(None, finite_reward(result.reward), None, result.components or {})]
    own = {name: each.reward for name, each in result.samples.items() if name not in (result.filled or ())}
    parts = [Reward(name, finite_reward(reward)) for name, reward in own.items() if reward is not None]
    rewards = [*whole, *parts, *(Reward(None, finite_reward(value), step) for step, value in steps)]
    if not rewards:
        raise GraderError("the rollout server gave no reward; call ctx.set_sample_reward for each, or ctx.set_reward once")
    return rewards


def _end_of(result: RolloutCompleteRequest | GraderCompleteRequest) -> End:
    # `end` is an extension of ours; every server sends the category.
    return result.end or (_END_BY_CATEGORY.get(result.err_category, End.AGENT_ERROR) if result.err_category else End.AGENT_ERROR)


def _message(message: str | None, otherwise: str) -> str:
    return one_line(WorkflowError(message)) if message else otherwise


def _address(url: str) -> str:
    """Returns `url` without a trailing slash; ValueError if it is no server's address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an address; write it as http://host:port")
    if parts.username or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: leave out what is not host, port and path")
    return url.rstrip("/")
