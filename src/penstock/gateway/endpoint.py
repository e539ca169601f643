"""The model routes over ASGI: read a request, answer it as JSON or as a stream, and notice when the caller is gone."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from hashlib import blake2b
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from penstock.errors import EngineBusy, EngineError, PenstockError, PoolError, RenderError, RequestError
from penstock.gateway.auth import header
from penstock.gateway.calls import Call, Caller, Limits, Prompt
from penstock.gateway.dialects.base import Answer, Dialect, Fresh
from penstock.gateway.serve import Service
from penstock.gateway.sessions import Session, Sessions, has_ended
from penstock.gateway.stream import Delta
from penstock.records import Step

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
RETRY_AFTER_S = b"1"


class ModelRoute:
    """One dialect's endpoint."""

    def __init__(self, dialect: Dialect, service: Service, sessions: Sessions, limits: Limits) -> None:
        self._dialect = dialect
        self._service = service
        self._sessions = sessions
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; `scope["rollout_id"]` is whose token it carried."""
        line = Line(send, self._dialect.error)
        try:
            await self._serve(scope, receive, line)
        except PenstockError as error:
            await line.refuse(as_refusal(error))

    async def _serve(self, scope: Scope, receive: Receive, line: "Line") -> None:
        caller = _caller(scope)
        body = await read_body(receive, self._limits.body_bytes)
        if body is None:
            return
        session = await self._sessions.get(caller.rollout_id)
        key = blake2b(body, digest_size=16).digest()
        try:
            call = self._dialect.parse(parse_json(body), session.sampling)
            replay = caller.is_retry and key not in session.refused
            work = self._answer(session, caller, call, line, replay=replay)
            if await attended(work, receive) and session.closed:
                raise has_ended(session.rollout_id)
        except PenstockError:
            session.refuse(key)
            raise
        session.refused.discard(key)

    async def _answer(self, session: Session, caller: Caller, call: Call, line: "Line", *, replay: bool) -> None:
        outlet = (StreamOutlet if call.stream else WholeOutlet)(self._dialect, line, call, self._service.engine.model)
        with session.running():
            await self._service.answer(session, caller, call, outlet, replay=replay)


class Line:
    """The way back to one caller. What cannot be sent because it hung up is dropped: `attended` deals with that."""

    def __init__(self, send: Send, error_body: Callable[[RequestError], dict[str, Any]]) -> None:
        self._send = send
        self._error_body = error_body
        self._started = False

    async def whole(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = (JSON,)) -> None:
        """A whole answer."""
        length = (b"content-length", str(len(body)).encode())
        self._started = True
        await self._write({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self._write({"type": "http.response.body", "body": body})

    async def part(self, body: bytes, *, last: bool = False) -> None:
        """More of a stream, which the first part begins."""
        if not self._started:
            self._started = True
            headers = [EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._write({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write({"type": "http.response.body", "body": body, "more_body": not last})

    async def refuse(self, error: RequestError) -> None:
        """An error: as the answer, or as the last event of a stream that has begun, which then has no end mark."""
        body = orjson.dumps(self._error_body(error))
        if self._started:
            await self.part(b"data: " + body + b"\n\n", last=True)
            return
        again = error.status in (429, 502, 503)
        headers = (JSON, (b"x-should-retry", b"true" if again else b"false"))
        await self.whole(error.status, body, (*headers, (b"retry-after", RETRY_AFTER_S)) if again else headers)

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError:
            return


class WholeOutlet:
    """Says nothing until everything is durable."""

    def __init__(self, dialect: Dialect, line: Line, call: Call, model: str) -> None:
        self._dialect = dialect
        self._line = line
        self._call = call
        self._model = model

    async def open(self, prompt: Prompt) -> None:
        """Not yet."""

    async def add(self, choice: int, deltas: list[Delta], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Not yet."""

    async def close(self, choice: int, step: Step) -> None:
        """Not yet."""

    async def done(self, prompt: Prompt, steps: list[Step]) -> None:
        """Now."""
        answer = _answer(self._model, self._call, prompt, steps)
        await self._line.whole(200, self._dialect.whole(answer))


class StreamOutlet:
    """Tells of tokens as they come; what ends a choice or the stream waits until it is durable."""

    def __init__(self, dialect: Dialect, line: Line, call: Call, model: str) -> None:
        self._dialect = dialect
        self._line = line
        self._call = call
        self._model = model
        self._answer: Answer | None = None
        self._untold: list[list[tuple[int, float]]] = [[] for _ in range(call.choices)]

    async def open(self, prompt: Prompt) -> None:
        """Begin the stream, once."""
        if self._answer is None:
            self._answer = _answer(self._model, self._call, prompt)
            await self._line.part(self._dialect.opening(self._answer))

    async def add(self, choice: int, deltas: list[Delta], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Send what the agent may see; tokens whose text is held back are told of with the next text."""
        self._untold[choice] += zip(ids, logprobs, strict=True)
        events = self._dialect.grown(self._begun, choice, deltas, self._fresh(choice))
        if events:
            self._untold[choice] = []
            await self._line.part(events)

    async def close(self, choice: int, step: Step) -> None:
        """End a choice."""
        await self._line.part(self._dialect.closing(self._begun, choice, step, self._fresh(choice)))

    async def done(self, prompt: Prompt, steps: list[Step]) -> None:
        """End the stream."""
        self._begun.steps = steps
        await self._line.part(self._dialect.ending(self._begun), last=True)

    @property
    def _begun(self) -> Answer:
        assert self._answer is not None, "a stream is opened before it grows"
        return self._answer

    def _fresh(self, choice: int) -> Fresh:
        untold = self._untold[choice]
        return Fresh([token_id for token_id, _ in untold], [logprob for _, logprob in untold])


async def attended(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Do `work` while the caller is there; False where it hung up and the work was cancelled for it, True otherwise."""
    present = True

    async def watch(task: asyncio.Task[None]) -> None:
        nonlocal present
        while (await receive())["type"] != "http.disconnect":
            pass
        present = task.done()
        task.cancel()

    async def attend() -> None:
        try:
            await work
        except PenstockError as error:
            errors.append(error)

    errors: list[PenstockError] = []
    async with asyncio.TaskGroup() as group:
        task = group.create_task(attend())
        watcher = group.create_task(watch(task))
        task.add_done_callback(lambda _: watcher.cancel())
    if errors:
        raise errors[0]
    return present


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The request's body; None where the caller hung up before it was complete."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise RequestError(f"the request is larger than {limit} bytes; send less", status=413, code="request_too_large")
    return b"".join(parts)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_json")
    return value  # pyright: ignore[reportUnknownVariableType]


def as_refusal(error: PenstockError) -> RequestError:
    """What a caller is told of an error."""
    if isinstance(error, RequestError):
        return error
    known: list[tuple[type[PenstockError], int, str]] = [
        (EngineBusy, 429, "engine_busy"),
        (EngineError, 502, "engine_error"),
        (RenderError, 400, "invalid_messages"),
        (PoolError, 503, "not_recorded"),
    ]
    status, code = next(((status, code) for kind, status, code in known if isinstance(error, kind)), (500, "internal_error"))
    return RequestError(str(error), status=status, code=code)


def _caller(scope: Scope) -> Caller:
    headers = scope["headers"]
    rollout_id, named = scope["rollout_id"], header(headers, b"x-rollout-id")
    if named and named != rollout_id:
        raise RequestError(f"x-rollout-id names {named}, but the token is that of {rollout_id}", code="rollout_mismatch")
    transcript = header(headers, b"x-sample-id") or "main"
    if len(transcript) > 200:
        raise RequestError("x-sample-id is longer than 200 characters", code="invalid_value", param="x-sample-id")
    return Caller(rollout_id, transcript, header(headers, b"x-stainless-retry-count") not in ("", "0"))


def _answer(model: str, call: Call, prompt: Prompt, steps: Sequence[Step] = ()) -> Answer:
    return Answer(uuid.uuid4().hex, int(time.time()), model, call, prompt, list(steps))
