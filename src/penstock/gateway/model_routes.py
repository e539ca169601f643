"""The model routes over ASGI: read a request, answer it with JSON or a stream, cancel the work when the caller hangs up."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import orjson
from starlette.types import Receive, Scope, Send

from penstock.errors import EngineBusy, EngineError, EngineRefused, PenstockError, PoolError, RenderError, RequestError
from penstock.gateway.call import Caller, ConversationHistory, GatewayLimits, ModelCall, Prompt
from penstock.gateway.call_pipeline import CallPipeline
from penstock.gateway.client_sessions import ANY_SESSION, SESSION_PROMPT, session_rollout
from penstock.gateway.dialects.base import Dialect, EventWriter, ModelAnswer, UnsentTokens
from penstock.gateway.last_request import LastRequest
from penstock.gateway.observability import CallTracer
from penstock.gateway.pending_response import PendingResponse, ResponseCache
from penstock.gateway.reply import Delta
from penstock.gateway.session import RunningCall, Session
from penstock.gateway.sources import no_tokens_error
from penstock.http.asgi import ON_DISCONNECT, header, parse_json, read_body
from penstock.records import Sampling, Step, TokenLogprobs
from penstock.sdk.routing import PLACEHOLDER_NAMES

PROMPT_UID = "penstock.prompt_uid"
"""Scope key: the prompt's uid if the path or body names the rollout without a token of its own, else None."""
NAMED_BY_PATH = "penstock.named_by_path"
"""Scope key: whether the path names a trajectory and its prompt, as the base URL of a black-box agent does."""
MAIN_TRANSCRIPT = "main"
CHAT = "chat"
"""The dialect of black-box agents, some of which parse tool calls themselves."""
TEXT_DIALECTS = "use /v1/chat/completions, /v1/responses or /v1/messages"
"""The remedy for a request that needs tokens, at a policy that has none."""


class FindSession(Protocol):
    """Returns the session of a rollout. With a `prompt_uid`, an unknown rollout is opened."""

    def __call__(self, rollout_id: str, prompt_uid: str | None, *, is_retry: bool = False) -> Awaitable[Session]: ...


class ModelRoute:
    """One dialect's endpoint. `scope["rollout_id"]` is the token's rollout, `scope["transcript"]` the one named in the path."""

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
        response = PendingResponse("", self._dialect, send)
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
            caller = summary.caller = _of_session(caller, scope, body)
            session = await self._find(caller.rollout_id, scope[PROMPT_UID], is_retry=caller.is_retry)
            is_black_box = scope[NAMED_BY_PATH]
            if caller.transcript == session.rollout.group_id:  # a path's `/{token}/{prompt}`: the prompt's uid, no transcript
                caller, is_black_box = caller._replace(transcript=MAIN_TRANSCRIPT), True
                summary.caller = caller
            response.request = _request_digest(caller, self._dialect.path, body, session.last_request(caller.transcript))
            if response.request in session.failed_requests:
                caller = caller._replace(is_retry=False)
            elif caller.is_retry and await self._repeat(session, response, scope, receive, send):
                return
            history = await self._pipeline.history(session, caller.transcript)
            with kept_request(session, caller.transcript):
                parsed = parse_json(body, history.last_request.body.read)
                caller, call = parse_call(self._pipeline, self._dialects, parsed, caller, session.sampling, history)
            if is_black_box and self._name == CHAT:
                call = self._pipeline.keep_call_text(call)
            summary.caller, summary.call = caller, call
        except PenstockError as error:
            await response.send_error(as_request_error(error))
            return
        await self._answer(session, caller, call, response, scope, receive)

    async def _repeat(self, session: Session, retry: PendingResponse, scope: Scope, receive: Receive, send: Send) -> bool:
        """Join the pending response to the same request, or send the cached one; False if there is neither."""
        if (first := session.pending.get(retry.request)) is not None:
            self._pipeline.count("joined_call")
            retry.sent = first.sent
            with suppress(CallerDisconnected):
                await run_while_connected(first.follow(send), scope, receive, first.remove_listener)
            return True
        if (sent := self._response_cache.get(retry.request)) is not None:
            self._pipeline.count("replayed_call")
            retry.sent = sent
            for message in sent:
                await send(message)
        return sent is not None

    async def _answer(
        self, session: Session, caller: Caller, call: ModelCall, response: PendingResponse, scope: Scope, receive: Receive
    ) -> None:
        try:
            with RunningCall(session, response), suppress(CallerDisconnected):
                work = self._work(session, caller, call, response)
                await run_while_connected(work, scope, receive, response.remove_listener, response.is_abandoned)
            session.failed_requests.discard(response.request)
        except PenstockError as error:
            session.mark_failed(response.request)
            refusal = as_request_error(error)
            if refusal.status == 400:
                session.forget_request(caller.transcript)
            await response.send_error(refusal)
        finally:
            response.end()
        self._response_cache.add(response)

    async def _work(self, session: Session, caller: Caller, call: ModelCall, response: PendingResponse) -> None:
        kind = StreamResponseWriter if call.stream else JsonResponseWriter
        writer = kind(self._dialects[call.policy], response, call, call.policy or self._pipeline.engine.model)
        if call.stream:
            response.start_keep_alive(self._limits.keep_alive_s)
        await self._pipeline.answer(session, caller, call, writer, response)


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
        response = PendingResponse("", self._dialect, send)
        try:
            caller = _caller(scope)
            body = await read_body(receive, self._limits.body_bytes)
            if body is None:
                return
            caller = _of_session(caller, scope, body)
            session = await self._find(caller.rollout_id, scope[PROMPT_UID])
            history = await self._pipeline.history(session, caller.transcript)
            with kept_request(session, caller.transcript):
                caller, call = parse_call(self._pipeline, self._dialects, parse_json(body), caller, session.sampling, history)
            tokens = await self._pipeline.count_tokens(session, caller, call)
        except PenstockError as error:
            await response.send_error(as_request_error(error))
            return
        await response.send_body(200, orjson.dumps(self._dialect.count(tokens)))


NO_TOKENS = UnsentTokens((), ())


class JsonResponseWriter:
    """See `ResponseWriter`: sends one JSON body, once every choice is durable."""

    def __init__(self, dialect: Dialect, response: PendingResponse, call: ModelCall, model: str) -> None:
        self._dialect = dialect
        self._response = response
        self._call = call
        self._model = model

    async def start(self, prompt: Prompt) -> None: ...

    async def add(
        self,
        choice: int,
        deltas: list[Delta],
        ids: Sequence[int],
        logprobs: Sequence[float],
        most_likely: Sequence[TokenLogprobs],
    ) -> None: ...

    async def finish_choice(self, choice: int, step: Step) -> None: ...

    async def finish(self, prompt: Prompt, steps: list[Step]) -> None:
        answer = ModelAnswer(self._response.name, self._response.created, self._model, self._call, prompt, steps)
        await self._response.send_body(200, self._dialect.json_body(answer))


class StreamResponseWriter:
    """See `ResponseWriter`: sends events as tokens come. Events that end a choice or the stream wait until it is durable."""

    def __init__(self, dialect: Dialect, response: PendingResponse, call: ModelCall, model: str) -> None:
        self._dialect = dialect
        self._response = response
        self._call = call
        self._model = model
        self._events: EventWriter | None = None
        self._unsent = [NO_TOKENS] * call.choices
        """By choice, tokens whose text is held back; the next event with text has them."""

    async def start(self, prompt: Prompt) -> None:
        if self._events is None:
            answer = ModelAnswer(self._response.name, self._response.created, self._model, self._call, prompt)
            self._events = self._dialect.events(answer)
            await self._response.send_events(self._events.start())

    async def add(
        self,
        choice: int,
        deltas: list[Delta],
        ids: Sequence[int],
        logprobs: Sequence[float],
        most_likely: Sequence[TokenLogprobs],
    ) -> None:
        self._unsent[choice] = self._unsent[choice].then(ids, logprobs, most_likely)
        events = self._started.delta(choice, deltas, self._unsent[choice])
        if events:
            self._unsent[choice] = NO_TOKENS
            await self._response.send_events(events)

    async def finish_choice(self, choice: int, step: Step) -> None:
        await self._response.send_events(self._started.finish_choice(choice, step, self._unsent[choice]))

    async def finish(self, prompt: Prompt, steps: list[Step]) -> None:
        await self._response.send_events(self._started.finish(steps), last=True)

    @property
    def _started(self) -> EventWriter:
        assert self._events is not None, "`start` comes first"
        return self._events


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
    work goes on for callers that joined: `on_disconnect` cancels it when `is_abandoned` becomes true.
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
    headers = scope["headers"]
    rollout_id, named = scope["rollout_id"], header(headers, b"x-rollout-id")
    if not rollout_id:
        rollout_id = named
    if not rollout_id:
        text = "whose call is this? call under /{trajectory}/{prompt}/v1, or send the rollout's model token or x-rollout-id"
        raise RequestError(text, code="unknown_caller")
    # A rollout server sends `{rollout_id}~{run}`: the part after the tilde tells runs apart.
    if named and named != rollout_id and rollout_id != ANY_SESSION and not named.startswith(f"{rollout_id}~"):
        raise RequestError(f"x-rollout-id names {named[:200]}, but the token is that of {rollout_id}", code="rollout_mismatch")
    transcript, key = header(headers, b"x-sample-id") or scope["transcript"] or MAIN_TRANSCRIPT, header(headers, b"idempotency-key")
    for name, value in (("x-sample-id", transcript), ("idempotency-key", key)):
        if len(value) > 200:
            raise RequestError(f"{name} is longer than 200 characters", code="invalid_value", param=name)
    return Caller(rollout_id, transcript, bool(key) or header(headers, b"x-stainless-retry-count") not in ("", "0"), key)


def _of_session(caller: Caller, scope: Scope, body: bytes) -> Caller:
    """The caller with the rollout of its session, if it came with the session key."""
    if caller.rollout_id != ANY_SESSION:
        return caller
    scope[PROMPT_UID] = SESSION_PROMPT
    return caller._replace(rollout_id=session_rollout(scope["headers"], body))


def _request_digest(caller: Caller, path: str, body: bytes, last_request: LastRequest) -> str:
    """Identifies a request when it is sent again: a digest of its caller and of every byte."""
    who = f"{caller.rollout_id}\0{caller.transcript}\0{caller.key}\0{path}\0"
    return last_request.body.digest(who.encode("utf-8", "surrogatepass"), body)[:24]
