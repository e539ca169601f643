"""Listens for the callbacks of rollout servers: how each workflow and each grader ended."""

import asyncio
import hmac
import json
import secrets
from collections.abc import MutableMapping
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import ConfigError, PenstockError, RequestError
from penstock.http.asgi import check_size, header, read_body
from penstock.http.listen import base_url, bind
from penstock.http.server import HttpServer
from penstock.rollout.executors.base import LoadTranscripts
from penstock_compat.rollout_server.protocol import (
    CompletionReply,
    GraderCompleteRequest,
    GraderStatus,
    RecordedTranscript,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutStatus,
    SampleBody,
)

MAX_CALLBACK_BYTES = 32 << 20
"""One of this size is parsed in 0.13 s, during which the loop waits."""
MAX_FINISHED = 4096
"""Finished rollouts that are remembered, so that a repeated callback is acknowledged instead of refused."""
LINGER_S = 2.0
"""How long the listener stays open at the end for callbacks that may still come: a server would retry for up to an hour."""
DRAIN_S = 1.0
READER_S = 60.0

B = TypeVar("B", RolloutCompleteRequest, GraderCompleteRequest)


class PendingCallbacks:
    """The two callbacks awaited of one rollout. The first of each kind counts; repeats change nothing."""

    __slots__ = ("completed", "graded", "key")

    def __init__(self, key: str) -> None:
        loop = asyncio.get_running_loop()
        self.key = key
        """The bearer token that its server must send."""
        self.completed: asyncio.Future[RolloutCompleteRequest] = loop.create_future()
        self.graded: asyncio.Future[GraderCompleteRequest] = loop.create_future()
        """Without its samples' messages: only the rewards are needed here."""


class FinishedRollout(NamedTuple):
    """What is remembered of a rollout whose wait has ended."""

    expect_more: bool
    """Whether a callback may still come."""
    key: str


class CallbackUrls(NamedTuple):
    completed: str
    graded: str


class CallbackListener:
    """An HTTP listener, open while the `async with` lasts. A completion is answered with the recorded transcripts."""

    def __init__(
        self, load_transcripts: LoadTranscripts, *, host: str, port: int, url: str = "", linger_s: float = LINGER_S
    ) -> None:
        self.key = secrets.token_urlsafe(32)
        """The bearer token of callers that keep the model's key apart from this one."""
        self._secret = secrets.token_bytes(32)
        self._load_transcripts = load_transcripts
        self._address = (host, port)
        self._url = url
        self._linger_s = linger_s
        self._pending: dict[str, PendingCallbacks] = {}
        self._finished: dict[str, FinishedRollout] = {}
        self._received = asyncio.Event()
        self._stack = AsyncExitStack()

    def __len__(self) -> int:
        """Returns how many rollouts are pending."""
        return len(self._pending)

    async def __aenter__(self) -> Self:
        host, port = self._address
        try:
            sock = bind(host, port)
        except ConfigError as cause:
            text = f"executor.callback_port = {port} on {host} cannot be used: {cause.__cause__}; set another, or 0 for a free one"
            raise ConfigError(text) from cause
        self._url = self._url or base_url(host, sock.getsockname()[1]).removesuffix("/v1")
        await self._stack.enter_async_context(HttpServer(self._serve, sock, drain_s=DRAIN_S, reader_s=READER_S))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s):
                while any(each.expect_more for each in self._finished.values()):
                    self._received.clear()
                    await self._received.wait()
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The listener's address, as servers reach it."""
        return self._url

    def urls(self, rollout_id: str) -> CallbackUrls:
        """Returns the rollout's callback URLs; their path holds a secret of this rollout, which its agent does not know."""
        base = f"{self._url}/{self._path(rollout_id)}/{quote(rollout_id, safe='')}"
        return CallbackUrls(f"{base}/completed", f"{base}/graded")

    def expect(self, rollout_id: str) -> PendingCallbacks:
        """Accepts callbacks of this rollout from now on."""
        self._finished.pop(rollout_id, None)
        self._pending[rollout_id] = PendingCallbacks(self.key)
        return self._pending[rollout_id]

    def get(self, rollout_id: str) -> PendingCallbacks | None:
        return self._pending.get(rollout_id)

    def forget(self, rollout_id: str, *, expect_more: bool = False) -> None:
        """Ends the wait for a rollout. Later callbacks are acknowledged and dropped; `expect_more` says that one may come."""
        pending = self._pending.pop(rollout_id, None)
        self._finished[rollout_id] = FinishedRollout(expect_more, pending.key if pending else self.key)
        while len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            body, status = await self._receive(scope, receive), 200
        except RequestError as error:
            body, status = {"error": {"message": str(error), "code": error.code}}, error.status
        except PenstockError as error:  # the pool failed
            body, status = {"error": {"message": str(error), "code": "not_recorded"}}, 503
        await Response(json.dumps(body), status, media_type="application/json")(scope, receive, send)

    async def _receive(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        rollout_id, kind = self._authorize(scope)
        try:
            body = await read_body(receive, MAX_CALLBACK_BYTES)
        except RequestError as error:
            if (waiting := self._pending.get(rollout_id)) is not None:
                _fail(waiting, rollout_id, kind, error)
            raise
        pending = self._pending.get(rollout_id)
        if pending is None and kind == "graded":
            self._finished[rollout_id] = self._finished[rollout_id]._replace(expect_more=False)
            self._received.set()
        if pending is None or body is None:
            return {}
        if kind == "graded":
            self._receive_grade(pending, rollout_id, body)
            return {}
        return await self._receive_completion(pending, rollout_id, body)

    def _authorize(self, scope: Scope) -> tuple[str, str]:
        """Returns the rollout's id and the kind of callback; RequestError for a caller without path or key."""
        path, _, rest = scope["path"].removeprefix("/").partition("/")
        rollout_id, _, kind = rest.rpartition("/")
        if not _equal(path, self._path(rollout_id)) or kind not in ("completed", "graded"):
            raise RequestError("there is nothing here", status=404, code="no_such_route")
        if scope["method"] != "POST":
            raise RequestError("use POST", status=405, code="wrong_method")
        known = self._pending.get(rollout_id) or self._finished.get(rollout_id)
        scheme, _, key = header(scope["headers"], b"authorization").partition(" ")
        if scheme.lower() != "bearer" or not _equal(key.strip(), known.key if known else self.key):
            raise RequestError("a callback needs the controller_api_key that came with the rollout", status=401, code="wrong_key")
        if known is None:
            raise RequestError(f"rollout {rollout_id} is not one of ours", status=404, code="no_such_rollout")
        return rollout_id, kind

    def _path(self, rollout_id: str) -> str:
        return hmac.new(self._secret, rollout_id.encode("utf-8", "replace"), "sha256").hexdigest()[:32]

    async def _receive_completion(self, pending: PendingCallbacks, rollout_id: str, body: bytes) -> dict[str, Any]:
        """A repeated completion is answered in full again: the first answer may have been lost, and the grader needs it."""
        try:
            result = _read(RolloutCompleteRequest, body, rollout_id)
        except RequestError as error:
            _fail(pending, rollout_id, "completed", error)
            raise
        reply = CompletionReply()
        if result.status is RolloutStatus.SUCCESS:
            reply.transcripts = await self._transcripts(pending, rollout_id)
        _set_once(pending.completed, result)
        return reply.model_dump(exclude_none=True)

    async def _transcripts(self, pending: PendingCallbacks, rollout_id: str) -> dict[str, RecordedTranscript]:
        try:
            recorded = await self._load_transcripts(rollout_id)
        except PenstockError as error:  # a failing pool ends our run, whatever the server does
            if not pending.completed.done():
                pending.completed.set_exception(error)
            raise
        return {
            name: RecordedTranscript(messages=each.messages, tools=each.tools, steps=list(each.steps), replies=each.replies)
            for name, each in recorded.items()
        }

    def _receive_grade(self, pending: PendingCallbacks, rollout_id: str, body: bytes) -> None:
        try:
            result = _read(GraderCompleteRequest, body, rollout_id)
        except RequestError as error:
            _fail(pending, rollout_id, "graded", error)
            raise
        result.samples = {name: SampleBody(id=name, reward=sample.reward) for name, sample in result.samples.items()}
        _set_once(pending.graded, result)


def _fail(pending: PendingCallbacks, rollout_id: str, kind: str, error: RequestError) -> None:
    """The callback was refused: the rollout ends with the reason instead of waiting for another one."""
    if kind == "graded":
        _set_once(pending.graded, GraderCompleteRequest(rollout_id=rollout_id, status=GraderStatus.FAILURE, err_message=str(error)))
        return
    failure, category = RolloutStatus.FAILURE, RolloutErrorCategory.AGENT_ERROR
    result = RolloutCompleteRequest(rollout_id=rollout_id, status=failure, err_message=str(error), err_category=category)
    _set_once(pending.completed, result)


def _read(kind: type[B], body: bytes, rollout_id: str) -> B:
    """Parses the body of a callback; RequestError 422 says what is wrong with it."""
    check_size(body)
    try:
        result = kind.model_validate_json(body)
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"the rollout server's callback cannot be read: {where + ': ' if where else ''}{first['msg']}"
        raise RequestError(text, status=422, code="invalid_callback") from cause
    if result.rollout_id != rollout_id or result.status == "pending":
        why = "names another rollout" if result.rollout_id != rollout_id else "says that the rollout has not ended"
        raise RequestError(f"the rollout server's callback {why}", status=422, code="invalid_callback")
    return result


T = TypeVar("T")


def _set_once(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _equal(sent: str, known: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), known.encode())  # in constant time
