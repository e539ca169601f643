"""Where rollout servers call back: how each workflow and each grader ended, taken once, from whoever holds the run's key."""

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
from penstock.http.asgi import header, read_body
from penstock.http.listen import base_url, bind
from penstock.http.server import HttpServer
from penstock.rollout.executors.base import Recorded
from penstock.rollout.server.protocol import (
    CompletionReply,
    GraderCompleteRequest,
    GraderStatus,
    RecordedTranscript,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutStatus,
    SampleBody,
)

LARGEST = 64 << 20
"""Bytes of a callback."""
OVER = 4096
"""Rollouts whose end is remembered, so that a server that repeats itself is told that all is well."""
LINGER_S = 2.0
"""How long callbacks are still taken when all is over: a server would try for long to deliver what nobody takes."""
DRAIN_S = 1.0
READER_S = 60.0

B = TypeVar("B", RolloutCompleteRequest, GraderCompleteRequest)


class PendingCallback:
    """What is awaited of one rollout. Each comes once; what is said afterwards changes nothing."""

    __slots__ = ("completed", "graded")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.completed: asyncio.Future[RolloutCompleteRequest] = loop.create_future()
        self.graded: asyncio.Future[GraderCompleteRequest] = loop.create_future()
        """Without its samples' messages: only the rewards are wanted here."""


class Urls(NamedTuple):
    """Where a rollout's server is to call."""

    completed: str
    graded: str


class Callbacks:
    """The listener, while the `async with` lasts. `recorded` is what a completion is answered with."""

    def __init__(self, recorded: Recorded, *, host: str, port: int, url: str = "", linger_s: float = LINGER_S) -> None:
        self.key = secrets.token_urlsafe(32)
        """What callers must show."""
        self._path = secrets.token_urlsafe(16)
        self._recorded = recorded
        self._address = (host, port)
        self._url = url
        self._linger_s = linger_s
        self._errands: dict[str, PendingCallback] = {}
        self._over: dict[str, bool] = {}
        """Whether a callback may still come."""
        self._called = asyncio.Event()
        self._stack = AsyncExitStack()

    def __len__(self) -> int:
        """How many rollouts are awaited."""
        return len(self._errands)

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
                while any(self._over.values()):
                    self._called.clear()
                    await self._called.wait()
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """What servers call us."""
        return self._url

    def urls(self, rollout_id: str) -> Urls:
        """Where the server of this rollout is to call; nobody who was not told can guess it."""
        place = f"{self._url}/{self._path}/{quote(rollout_id, safe='')}"
        return Urls(f"{place}/completed", f"{place}/graded")

    def expect(self, rollout_id: str) -> PendingCallback:
        """Take callbacks of this rollout from now on."""
        self._over.pop(rollout_id, None)
        self._errands[rollout_id] = PendingCallback()
        return self._errands[rollout_id]

    def get(self, rollout_id: str) -> PendingCallback | None:
        """What is awaited of the rollout."""
        return self._errands.get(rollout_id)

    def forget(self, rollout_id: str, *, owed: bool = False) -> None:
        """The rollout is over: what still comes, where something is `owed`, is acknowledged and dropped."""
        self._errands.pop(rollout_id, None)
        self._over[rollout_id] = owed
        while len(self._over) > OVER:
            del self._over[next(iter(self._over))]

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            answer, status = await self._take(scope, receive), 200
        except RequestError as error:
            answer, status = {"error": {"message": str(error), "code": error.code}}, error.status
        except PenstockError as error:  # our pool
            answer, status = {"error": {"message": str(error), "code": "not_recorded"}}, 503
        await Response(json.dumps(answer), status, media_type="application/json")(scope, receive, send)

    async def _take(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        rollout_id, what = self._admit(scope)
        body = await read_body(receive, LARGEST)
        errand = self._errands.get(rollout_id)
        if errand is None and what == "graded":
            self._over[rollout_id] = False
            self._called.set()
        if errand is None or body is None:
            return {}
        if what == "graded":
            self._take_grade(errand, rollout_id, body)
            return {}
        return await self._take_completion(errand, rollout_id, body)

    def _admit(self, scope: Scope) -> tuple[str, str]:
        """The rollout that is called about, and what about it; RequestError for everyone else."""
        path, _, rest = scope["path"].removeprefix("/").partition("/")
        rollout_id, _, what = rest.rpartition("/")
        if not _same(path, self._path) or what not in ("completed", "graded"):
            raise RequestError("there is nothing here", status=404, code="no_such_route")
        if scope["method"] != "POST":
            raise RequestError("use POST", status=405, code="wrong_method")
        scheme, _, key = header(scope["headers"], b"authorization").partition(" ")
        if scheme.lower() != "bearer" or not _same(key.strip(), self.key):
            raise RequestError("a callback needs the controller_api_key that came with the rollout", status=401, code="wrong_key")
        if rollout_id not in self._errands and rollout_id not in self._over:
            raise RequestError(f"rollout {rollout_id} is not one of ours", status=404, code="no_such_rollout")
        return rollout_id, what

    async def _take_completion(self, errand: PendingCallback, rollout_id: str, body: bytes) -> dict[str, Any]:
        """Answered again in full when it is repeated: the first answer may not have arrived, and the grader needs it."""
        try:
            told = _read(RolloutCompleteRequest, body, rollout_id)
        except RequestError as error:
            failure, blame = RolloutStatus.FAILURE, RolloutErrorCategory.AGENT_ERROR
            told = RolloutCompleteRequest(rollout_id=rollout_id, status=failure, err_message=str(error), err_category=blame)
            _settle(errand.completed, told)
            raise
        reply = CompletionReply()
        if told.status is RolloutStatus.SUCCESS:
            reply.transcripts = await self._transcripts(errand, rollout_id)
        _settle(errand.completed, told)
        return reply.model_dump(exclude_none=True)

    async def _transcripts(self, errand: PendingCallback, rollout_id: str) -> dict[str, RecordedTranscript]:
        """What was recorded; a pool that fails is no matter of the server's, but ends our run."""
        try:
            kept = await self._recorded(rollout_id)
        except PenstockError as error:
            if not errand.completed.done():
                errand.completed.set_exception(error)
            raise
        return {
            name: RecordedTranscript(messages=each.messages, tools=each.tools, steps=list(each.steps))
            for name, each in kept.items()
        }

    def _take_grade(self, errand: PendingCallback, rollout_id: str, body: bytes) -> None:
        try:
            told = _read(GraderCompleteRequest, body, rollout_id)
        except RequestError as error:
            _settle(
                errand.graded, GraderCompleteRequest(rollout_id=rollout_id, status=GraderStatus.FAILURE, err_message=str(error))
            )
            raise
        told.samples = {name: SampleBody(id=name, reward=sample.reward) for name, sample in told.samples.items()}
        _settle(errand.graded, told)


def _read(kind: type[B], body: bytes, rollout_id: str) -> B:
    """The body of a callback; RequestError 422 says what is wrong with it."""
    try:
        told = kind.model_validate_json(body)
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"the rollout server's callback cannot be read: {where + ': ' if where else ''}{first['msg']}"
        raise RequestError(text, status=422, code="invalid_callback") from cause
    if told.rollout_id != rollout_id or told.status == "pending":
        why = "names another rollout" if told.rollout_id != rollout_id else "says that the rollout has not ended"
        raise RequestError(f"the rollout server's callback {why}", status=422, code="invalid_callback")
    return told


T = TypeVar("T")


def _settle(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), known.encode())
