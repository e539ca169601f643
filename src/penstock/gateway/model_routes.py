"""The model routes over ASGI: read a request, answer it as JSON or as a stream, and notice when the caller is gone."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

import orjson
from starlette.types import Receive, Scope, Send

from penstock.errors import EngineBusy, EngineError, PenstockError, PoolError, RenderError, RequestError
from penstock.gateway.call import Call, Caller, Limits, Prompt
from penstock.gateway.call_pipeline import Service
from penstock.gateway.dialects.base import Answer, Dialect, EventWriter, Fresh
from penstock.gateway.last_request import LastRequest
from penstock.gateway.observability import Spans
from penstock.gateway.pending_response import PendingResponse, ResponseCache
from penstock.gateway.reply import Delta
from penstock.gateway.session import Session
from penstock.http.asgi import LEAVING, header, parse_json, read_body
from penstock.records import Step

VISIT = "penstock.visit"
"""In a scope: the prompt's uid, where the path or the body names the rollout without a token of its own; else None."""
MAIN = "main"


class FindSession(Protocol):
    """The session of a rollout; where a prompt's uid is given as `visit`, of one that may not be there yet."""

    def __call__(self, rollout_id: str, visit: str | None, *, again: bool = False) -> Awaitable[Session]: ...


class ModelRoute:
    """One dialect's endpoint. `scope["rollout_id"]` is whose token a request carried, `scope["transcript"]` what its path says."""

    def __init__(
        self,
        dialect: Dialect,
        service: Service,
        find: FindSession,
        *,
        name: str,
        limits: Limits,
        told: ResponseCache,
        spans: Spans | None,
    ) -> None:
        self._dialect = dialect
        self._name = name
        self._spans = spans
        self._service = service
        self._find = find
        self._limits = limits
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or join or repeat the answer to the one that it repeats; count it and tell of it."""
        flight = PendingResponse("", self._dialect, send)
        started, metrics = time.perf_counter(), self._service.metrics
        metrics.begin()
        try:
            await self._serve(flight, scope, receive, send)
        finally:
            seconds = time.perf_counter() - started
            metrics.end(self._name, flight.status, flight.account, seconds=seconds)
            if self._spans is not None:
                self._spans.tell(self._name, flight.account, scope["headers"], seconds=seconds)

    async def _serve(self, flight: PendingResponse, scope: Scope, receive: Receive, send: Send) -> None:
        account = flight.account
        try:
            caller = account.caller = _caller(scope)
            body = await read_body(receive, self._limits.body_bytes)
            if body is None:
                return
            session = await self._find(caller.rollout_id, scope[VISIT], again=caller.is_retry)
            if caller.transcript == session.rollout.group_id:  # in a path, after the token: which prompt it is, not who speaks
                caller = account.caller = caller._replace(transcript=MAIN)
            flight.request = _request(caller, self._dialect.path, body, session.talk(caller.transcript))
            if flight.request in session.refused:
                caller = caller._replace(is_retry=False)
            elif caller.is_retry and await self._repeat(session, flight, scope, receive, send):
                return
            past = await self._service.past(session, caller.transcript)
            call = account.call = self._dialect.parse(parse_json(body, past.talk.body.read), session.sampling, past)
        except PenstockError as error:
            await flight.refuse(as_refusal(error))
            return
        await self._answer(session, caller, call, flight, scope, receive)

    async def _repeat(self, session: Session, again: PendingResponse, scope: Scope, receive: Receive, send: Send) -> bool:
        """Join the call that this one repeats, or send its answer again; False where neither is there."""
        if (flight := session.flights.get(again.request)) is not None:
            self._service.count("joined_call")
            again.sent = flight.sent
            with suppress(Left):
                await attended(flight.follow(send), scope, receive, flight.leave)
            return True
        if (sent := self._told.find(again.request)) is not None:
            self._service.count("replayed_call")
            again.sent = sent
            for message in sent:
                await send(message)
        return sent is not None

    async def _answer(
        self, session: Session, caller: Caller, call: Call, flight: PendingResponse, scope: Scope, receive: Receive
    ) -> None:
        try:
            with session.carrying(flight), suppress(Left):
                work = self._work(session, caller, call, flight)
                await attended(work, scope, receive, flight.leave, flight.is_given_up)
            session.refused.discard(flight.request)
        except PenstockError as error:
            session.refuse(flight.request)
            await flight.refuse(as_refusal(error))
        finally:
            flight.land()
        self._told.keep(flight)

    async def _work(self, session: Session, caller: Caller, call: Call, flight: PendingResponse) -> None:
        outlet = (StreamOutlet if call.stream else WholeOutlet)(self._dialect, flight, call, self._service.engine.model)
        if call.stream:
            flight.keep_alive(self._limits.keep_alive_s)
        await self._service.answer(session, caller, call, outlet, flight)


class CountRoute:
    """Counts the tokens of a request's prompt; nothing is sampled and nothing recorded."""

    def __init__(self, dialect: Dialect, service: Service, find: FindSession, *, limits: Limits) -> None:
        self._dialect = dialect
        self._service = service
        self._find = find
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        flight = PendingResponse("", self._dialect, send)
        try:
            caller = _caller(scope)
            body = await read_body(receive, self._limits.body_bytes)
            if body is None:
                return
            session = await self._find(caller.rollout_id, scope[VISIT])
            call = self._dialect.parse(parse_json(body), session.sampling, await self._service.past(session, caller.transcript))
            tokens = await self._service.count_tokens(session, caller, call)
        except PenstockError as error:
            await flight.refuse(as_refusal(error))
            return
        await flight.whole(200, orjson.dumps(self._dialect.count(tokens)))


class WholeOutlet:
    """Says nothing until everything is durable."""

    def __init__(self, dialect: Dialect, flight: PendingResponse, call: Call, model: str) -> None:
        self._dialect = dialect
        self._flight = flight
        self._call = call
        self._model = model

    async def open(self, prompt: Prompt) -> None: ...

    async def add(self, choice: int, deltas: list[Delta], ids: Sequence[int], logprobs: Sequence[float]) -> None: ...

    async def close(self, choice: int, step: Step) -> None: ...

    async def done(self, prompt: Prompt, steps: list[Step]) -> None:
        answer = Answer(self._flight.name, self._flight.created, self._model, self._call, prompt, steps)
        await self._flight.whole(200, self._dialect.whole(answer))


class StreamOutlet:
    """Tells of tokens as they come; what ends a choice or the stream waits until it is durable."""

    def __init__(self, dialect: Dialect, flight: PendingResponse, call: Call, model: str) -> None:
        self._dialect = dialect
        self._flight = flight
        self._call = call
        self._model = model
        self._events: EventWriter | None = None
        self._untold: list[list[tuple[int, float]]] = [[] for _ in range(call.choices)]

    async def open(self, prompt: Prompt) -> None:
        """Begin the stream, once."""
        if self._events is None:
            answer = Answer(self._flight.name, self._flight.created, self._model, self._call, prompt)
            self._events = self._dialect.events(answer)
            await self._flight.part(self._events.opening())

    async def add(self, choice: int, deltas: list[Delta], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Send what the agent may see; tokens whose text is held back are told of with the next text."""
        self._untold[choice] += zip(ids, logprobs, strict=True)
        events = self._begun.grown(choice, deltas, self._fresh(choice))
        if events:
            self._untold[choice] = []
            await self._flight.part(events)

    async def close(self, choice: int, step: Step) -> None:
        await self._flight.part(self._begun.closing(choice, step, self._fresh(choice)))

    async def done(self, prompt: Prompt, steps: list[Step]) -> None:
        await self._flight.part(self._begun.ending(steps), last=True)

    @property
    def _begun(self) -> EventWriter:
        assert self._events is not None, "a stream is opened before it grows"
        return self._events

    def _fresh(self, choice: int) -> Fresh:
        untold = self._untold[choice]
        return Fresh([token_id for token_id, _ in untold], [logprob for _, logprob in untold])


class Left(Exception):
    """The caller hung up, and with it the reason to go on."""


async def attended(
    work: Coroutine[Any, Any, None],
    scope: Scope,
    receive: Receive,
    leave: Callable[[], None],
    given_up: Callable[[], bool] | None = None,
) -> None:
    """Do `work` while somebody waits for it; raises Left where nobody does any more.

    When this caller hangs up, `leave` is called. With `given_up`, the work goes on as long as that is false, and `leave` cancels
    it when it no longer is; without, it is cancelled at once.
    """
    task = asyncio.current_task()
    assert task is not None
    left = False

    def hung_up() -> None:
        nonlocal left
        left = True
        leave()
        if given_up is None:
            task.cancel()

    stop_watching = _watch(scope, receive, hung_up)
    try:
        await work
    except asyncio.CancelledError:
        if not (left if given_up is None else given_up()):
            raise
        task.uncancel()
        raise Left from None
    finally:
        stop_watching()


def _watch(scope: Scope, receive: Receive, hung_up: Callable[[], None]) -> Callable[[], object]:
    """Have `hung_up` called when the caller hangs up, until what is returned is called. Our own server tells it by itself."""
    when_left = scope.get(LEAVING)
    if when_left is not None:
        when_left(hung_up)
        return lambda: when_left(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        hung_up()

    return asyncio.create_task(watch()).cancel


def as_refusal(error: PenstockError) -> RequestError:
    """What a caller is told of an error."""
    if isinstance(error, RequestError):
        return error
    known: list[tuple[type[PenstockError], int, str]] = [
        (EngineBusy, 503, "engine_busy"),
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
    # A rollout server knows a rollout by more than its id: what follows the tilde tells runs apart.
    if named and named != rollout_id and not named.startswith(f"{rollout_id}~"):
        raise RequestError(f"x-rollout-id names {named}, but the token is that of {rollout_id}", code="rollout_mismatch")
    transcript, key = header(headers, b"x-sample-id") or scope["transcript"] or MAIN, header(headers, b"idempotency-key")
    for name, value in (("x-sample-id", transcript), ("idempotency-key", key)):
        if len(value) > 200:
            raise RequestError(f"{name} is longer than 200 characters", code="invalid_value", param=name)
    return Caller(rollout_id, transcript, bool(key) or header(headers, b"x-stainless-retry-count") not in ("", "0"), key)


def _request(caller: Caller, path: str, body: bytes, talk: LastRequest) -> str:
    """What a request is known by when it comes again: a digest of whose it is and of every byte."""
    who = f"{caller.rollout_id}\0{caller.transcript}\0{caller.key}\0{path}\0"
    return talk.body.digest(who.encode("utf-8", "surrogatepass"), body)[:24]
