"""The model routes over ASGI: read a request, answer it with JSON or a stream, cancel the work when the caller hangs up."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.codec import UNLOCKED, pieces
from penstock.errors import EngineBusy, EngineError, EngineRefused, PenstockError, PoolError, RenderError, RequestError
from penstock.gateway.auth import ANY_SESSION
from penstock.gateway.dialects.base import Dialect, ModelAnswer
from penstock.gateway.dialects.responses import ECHOED, RESPONSE_ID, ResponsesDialect
from penstock.gateway.observability import CallTracer
from penstock.gateway.pipeline import CallPipeline
from penstock.gateway.request import Caller, CallScope, ConversationHistory, GatewayLimits, ModelCall, Prompt
from penstock.gateway.response import PendingResponse, ResponseCache
from penstock.gateway.session import SESSION_PROMPT, RunningCall, Session, session_rollout
from penstock.gateway.sources import no_tokens_error
from penstock.http.asgi import ON_DISCONNECT, header, parse_json, read_body
from penstock.pool.base import Pool
from penstock.records import Sampling
from penstock.sdk.routing import PLACEHOLDER_NAMES

MAIN_TRANSCRIPT = "main"
CHAT = "chat"
"""The dialect of black-box agents, some of which parse tool calls themselves."""
TEXT_DIALECTS = "use /v1/chat/completions, /v1/responses or /v1/messages"
"""The remedy for a request that needs tokens, at a policy that has none."""


class FindSession(Protocol):
    """Returns the session of a rollout. With a `prompt_uid`, an unknown rollout is opened."""

    def __call__(self, rollout_id: str, prompt_uid: str | None, *, is_retry: bool = False) -> Awaitable[Session]: ...


class ModelRoute:
    """One dialect's endpoint."""

    def __init__(
        self,
        dialects: Mapping[str, Dialect],
        pipeline: CallPipeline,
        find: FindSession,
        *,
        name: str,
        limits: GatewayLimits,
        response_cache: ResponseCache,
        tracer: CallTracer | None,
    ) -> None:
        self._dialects = dialects
        """By policy. They differ in their tokenizers alone."""
        self._dialect = next(iter(dialects.values()))
        self._name = name
        self._tracer = tracer
        self._pipeline = pipeline
        self._find = find
        self._limits = limits
        self._response_cache = response_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and count and trace it. A retry joins the pending response or gets the cached one."""
        response = PendingResponse(self._dialect, send)
        started, metrics = time.perf_counter(), self._pipeline.metrics
        metrics.begin()
        try:
            await self._serve(response, scope, receive, send)
        finally:
            seconds = time.perf_counter() - started
            metrics.end(self._name, response.status, response.summary, seconds=seconds)
            if self._tracer is not None:
                self._tracer.record_call(self._name, response.summary, scope["headers"], seconds=seconds)

    async def _serve(self, response: PendingResponse, scope: Scope, receive: Receive, send: Send) -> None:
        summary = response.summary
        try:
            caller = summary.caller = _caller(scope)
            body = await read_body(receive, self._limits.body_bytes)
            if body is None:
                return
            caller, prompt_uid = _of_session(caller, scope, body)
            summary.caller = caller
            session = await self._find(caller.rollout_id, prompt_uid, is_retry=caller.is_retry)
            is_black_box = CallScope.of(scope).named_by_path
            if caller.transcript == session.rollout.group_id:  # a path's `/{token}/{prompt}`: the prompt's uid, no transcript
                caller, is_black_box = caller._replace(transcript=MAIN_TRANSCRIPT), True
                summary.caller = caller
            response.request = _request_digest(caller, self._dialect.path, body)
            history = await self._pipeline.history(session, caller.transcript)
            # Nothing is awaited from here to the start of the call, so that a retry always finds the pending response.
            if caller.is_retry and await self._repeat(session, response, scope, receive, send):
                return
            with kept_request(session, caller.transcript):
                caller, call = parse_call(self._pipeline, self._dialects, parse_json(body), caller, session.sampling, history)
            if is_black_box and self._name == CHAT:
                call = self._pipeline.keep_call_text(call)
            summary.caller, summary.call = caller, call
        except PenstockError as error:
            await response.send_error(as_request_error(error))
            return
        await self._answer(session, caller, call, response, scope, receive)

    async def _repeat(self, session: Session, retry: PendingResponse, scope: Scope, receive: Receive, send: Send) -> bool:
        """Joins the pending response to the same request, or sends the cached one; False if there is neither."""
        if (first := session.pending.get(retry.request)) is not None:
            self._pipeline.count("joined_call")
            retry.sent = first.sent
            with suppress(CallerDisconnected):
                await run_while_connected(first.follow(send), scope, receive, first.remove_listener)
            return True
        if retry.request in session.failed_requests or (sent := self._response_cache.get(retry.request)) is None:
            return False
        self._pipeline.count("replayed_call")
        retry.sent = sent
        for message in sent:
            await send(message)
        return True

    async def _answer(
        self, session: Session, caller: Caller, call: ModelCall, response: PendingResponse, scope: Scope, receive: Receive
    ) -> None:
        try:
            with RunningCall(session, response), suppress(CallerDisconnected):
                model = call.policy or self._pipeline.engine.model
                response.begin(call, self._dialects[call.policy], model=model, keep_alive_s=self._limits.keep_alive_s)
                work = self._pipeline.answer(session, caller, call, response)
                await run_while_connected(work, scope, receive, response.remove_listener, response.is_abandoned)
            session.failed_requests.pop(response.request, None)
        except PenstockError as error:
            session.mark_failed(response)
            refusal = as_request_error(error)
            if refusal.status == 400:
                session.forget_request(caller.transcript)
            await response.send_error(refusal)
        finally:
            response.end()
        self._response_cache.add(response)


def parse_call(
    pipeline: CallPipeline,
    dialects: Mapping[str, Dialect],
    body: dict[str, Any],
    caller: Caller,
    defaults: Sampling,
    history: ConversationHistory,
) -> tuple[Caller, ModelCall]:
    """Choose the policy that the request asks for, and parse it in that policy's dialect.

    A caller that names no transcript gets one for each policy it asks: they are different agents.
    """
    transcript = caller.transcript if caller.transcript != MAIN_TRANSCRIPT else ""
    policy = pipeline.policies.choose(body.get("model"), transcript)
    if policy not in dialects:
        raise no_tokens_error(policy, TEXT_DIALECTS)
    call = dialects[policy].parse(body, defaults, history)
    if not policy:
        return caller, call
    if policy not in (body.get("model"), transcript) and body.get("model") not in PLACEHOLDER_NAMES:
        pipeline.count(f"answered_by_default:{call.model}")
    return caller._replace(transcript=transcript or policy), replace(call, policy=policy)


class CountRoute:
    """Counts the tokens of a request's prompt; nothing is sampled or recorded."""

    def __init__(
        self, dialects: Mapping[str, Dialect], pipeline: CallPipeline, find: FindSession, *, limits: GatewayLimits
    ) -> None:
        self._dialects = dialects
        self._dialect = next(iter(dialects.values()))
        self._pipeline = pipeline
        self._find = find
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = PendingResponse(self._dialect, send)
        try:
            caller = _caller(scope)
            body = await read_body(receive, self._limits.body_bytes)
            if body is None:
                return
            caller, prompt_uid = _of_session(caller, scope, body)
            session = await self._find(caller.rollout_id, prompt_uid)
            history = await self._pipeline.history(session, caller.transcript)
            with kept_request(session, caller.transcript):
                caller, call = parse_call(self._pipeline, self._dialects, parse_json(body), caller, session.sampling, history)
            tokens = await self._pipeline.count_tokens(session, caller, call)
        except PenstockError as error:
            await response.send_error(as_request_error(error))
            return
        await response.send_body(200, orjson.dumps(self._dialect.count(tokens)))


@contextmanager
def kept_request(session: Session, transcript: str) -> Generator[None]:
    """Reads a request. What was read is kept for the transcript's next one, unless this one is refused."""
    try:
        yield
    except PenstockError:
        session.forget_request(transcript)
        raise
    session.report_weight()


class CallerDisconnected(Exception):
    """Nobody waits for the response any more."""


async def run_while_connected(
    work: Coroutine[Any, Any, None],
    scope: Scope,
    receive: Receive,
    on_disconnect: Callable[[], None],
    is_abandoned: Callable[[], bool] | None = None,
) -> None:
    """Run `work` while its caller is connected; raises CallerDisconnected if it was cancelled because nobody waits for it.

    `on_disconnect` is called when this caller hangs up. Without `is_abandoned` the work is then cancelled at once. With it, the
    work continues for callers that joined: `on_disconnect` cancels it when `is_abandoned` becomes true.
    """
    task = asyncio.current_task()
    assert task is not None
    disconnected = False

    def hung_up() -> None:
        nonlocal disconnected
        disconnected = True
        on_disconnect()
        if is_abandoned is None:
            task.cancel()

    stop_watching = _watch(scope, receive, hung_up)
    try:
        await work
    except asyncio.CancelledError:
        if not (disconnected if is_abandoned is None else is_abandoned()):
            raise  # somebody else cancelled the task: the server stops, or the rollout was closed
        task.uncancel()
        raise CallerDisconnected from None
    finally:
        stop_watching()


def _watch(scope: Scope, receive: Receive, hung_up: Callable[[], None]) -> Callable[[], object]:
    """Call `hung_up` when the caller hangs up; returns a function that stops the watch.

    Our own server calls back, which costs no task. Under any other ASGI server a task waits for `http.disconnect`.
    """
    on_disconnect = scope.get(ON_DISCONNECT)
    if on_disconnect is not None:
        on_disconnect(hung_up)
        return lambda: on_disconnect(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        hung_up()

    return asyncio.create_task(watch()).cancel


def as_request_error(error: PenstockError) -> RequestError:
    """The error as a caller gets it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineBusy):
        return RequestError(str(error), status=error.status, code="engine_busy", retry_after_s=error.retry_after_s)
    known: list[tuple[type[PenstockError], int, str]] = [
        (EngineRefused, 400, "engine_refused"),
        (EngineError, 502, "engine_error"),
        (RenderError, 400, "invalid_messages"),
        (PoolError, 503, "not_recorded"),
    ]
    status, code = next(((status, code) for kind, status, code in known if isinstance(error, kind)), (500, "internal_error"))
    return RequestError(str(error), status=status, code=code)


def _caller(scope: Scope) -> Caller:
    headers, known = scope["headers"], CallScope.of(scope)
    named = header(headers, b"x-rollout-id")
    rollout_id = known.rollout_id or named
    if not rollout_id:
        text = "whose call is this? call under /{trajectory}/{prompt}/v1, or send the rollout's model token or x-rollout-id"
        raise RequestError(text, code="unknown_caller")
    # A rollout server sends `{rollout_id}~{run}`: the part after the tilde is the run.
    if named and named != rollout_id and rollout_id != ANY_SESSION and not named.startswith(f"{rollout_id}~"):
        raise RequestError(f"x-rollout-id names {named[:200]}, but the token is that of {rollout_id}", code="rollout_mismatch")
    transcript, key = header(headers, b"x-sample-id") or known.transcript or MAIN_TRANSCRIPT, header(headers, b"idempotency-key")
    for name, value in (("x-sample-id", transcript), ("idempotency-key", key)):
        if len(value) > 200:
            raise RequestError(f"{name} is longer than 200 characters", code="invalid_value", param=name)
    return Caller(rollout_id, transcript, bool(key) or header(headers, b"x-stainless-retry-count") not in ("", "0"), key)


def _of_session(caller: Caller, scope: Scope, body: bytes) -> tuple[Caller, str | None]:
    """Returns the caller and its prompt's uid. The session key stands for the rollout of the request's session."""
    if caller.rollout_id != ANY_SESSION:
        return caller, CallScope.of(scope).prompt_uid
    return caller._replace(rollout_id=session_rollout(scope["headers"], body)), SESSION_PROMPT


def _request_digest(caller: Caller, path: str, body: bytes) -> str:
    """Identifies a request when it is sent again: a digest of its caller and of every byte."""
    who = f"{caller.rollout_id}\0{caller.transcript}\0{caller.key}\0{path}\0"
    digest = sha256(who.encode("utf-8", "surrogatepass"))
    for piece in pieces(body, UNLOCKED):
        digest.update(piece)
    return digest.hexdigest()[:24]


# Stored responses


class StoredResponses:
    """Fields of the request that were not recorded, such as its metadata, have their defaults."""

    def __init__(self, pipeline: CallPipeline, find: FindSession, pool: Pool) -> None:
        self._pipeline = pipeline
        self._find = find
        self._pool = pool

    async def get(self, request: Request) -> Response:
        caller, prompt_uid = _of_session(Caller(CallScope.of(request.scope).rollout_id), request.scope, b"")
        session = await self._find(caller.rollout_id, prompt_uid)
        graph = await session.graph(self._pool)
        name = request.path_params.get("response", "")
        steps = graph.answer(name.removeprefix(RESPONSE_ID))
        if not name.startswith(RESPONSE_ID) or not steps:
            text = f"response {name[:200]!r} is none of this rollout"
            raise RequestError(text, status=404, code="response_not_found", param="response_id")
        step = steps[0]
        node = graph.nodes[step.node]
        prompt = Prompt(ids=graph.path(step.node), parent=node.parent, added=(), messages=(), tools=(), chain=node.messages_digest)
        source = self._pipeline.policies.by_name[step.policy]
        call = ModelCall(model="", messages=(), sampling=step.sampling, echo=tuple(ECHOED.items()))
        model = step.policy or source.engine.model
        answer = ModelAnswer(step.answer, step.created, model, call, prompt, [step])
        return Response(ResponsesDialect(source.tokenizer).json_body(answer), media_type="application/json")
