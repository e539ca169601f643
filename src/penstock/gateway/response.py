"""The response to one model call: the dialect formats it, callers get it as it grows, complete ones stay in a cache.

Every message is kept until the response is complete, so that a retry that joins late gets it from the first byte on. Complete
responses stay in the cache for a while, so that a later retry gets the same bytes.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import orjson
from starlette.types import Message as AsgiMessage
from starlette.types import Send

from penstock.errors import RequestError
from penstock.gateway.dialects.base import Dialect, EventWriter, ModelAnswer, UnsentTokens
from penstock.gateway.reply import Delta
from penstock.gateway.request import CallSummary, ModelCall, Prompt
from penstock.records import Step

NO_TOKENS = UnsentTokens((), ())
JSON_TYPE = (b"content-type", b"application/json")
STREAM_START: AsgiMessage = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
RETRYABLE_STATUSES = (429, 502, 503)
"""After these the same call may be sent again, in `RETRY_AFTER_S`."""
RETRY_AFTER_S = 1


def retry_after(error: RequestError) -> bytes:
    """The value of Retry-After, in whole seconds."""
    return b"%d" % max(RETRY_AFTER_S, ceil(error.retry_after_s))


MAX_CACHED_BYTES = 32 << 20
"""The limit for all complete responses that are kept."""


class PendingResponse:
    """Sends one response to the caller and to retries that joined. If a caller hung up, messages are only kept."""

    def __init__(self, dialect: Dialect, send: Send) -> None:
        self.request = ""
        """Digest of the request, its rollout and transcript; empty until it is read."""
        self.name = ""
        """The answer's name (`Step.answer`); set when the session starts the call."""
        self.created = time.time()
        self.sent: list[AsgiMessage] = []
        self.complete = False
        """Whether the whole response was sent and is no error."""
        self.summary = CallSummary()
        self._dialect = dialect
        self._send = send
        self._listeners = 1
        self._ended = False
        self._changed: asyncio.Event | None = None
        """Wakes the retries that follow; None while there are none."""
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._last_write = 0.0
        self._call: ModelCall | None = None
        self._model = ""
        self._events: EventWriter | None = None
        """The dialect's writer of a streamed response; None before its first event."""
        self._unsent: list[UnsentTokens] = []
        """By choice, tokens whose text is held back; the next event with text has them."""

    def begin(self, call: ModelCall, dialect: Dialect, *, model: str, keep_alive_s: float) -> None:
        """Sets what is answered and how. Pings a caller that waits for a stream."""
        self._call, self._dialect, self._model = call, dialect, model
        self._unsent = [NO_TOKENS] * call.choices
        if call.stream:
            loop = asyncio.get_running_loop()
            self._last_write = self._last_write or loop.time()
            self._timer = loop.call_at(self._last_write + keep_alive_s, self._tick, keep_alive_s)

    async def add(self, prompt: Prompt, choice: int, deltas: list[Delta], tokens: UnsentTokens) -> None:
        """Streams new tokens of a choice and the text that they make visible; without a stream, `finish` sends all."""
        if not self._is_stream:
            return
        if self._events is None:
            self._events = self._dialect.events(self._answer(prompt))
            await self.send_events(self._events.start())
        unsent = self._unsent[choice] = self._unsent[choice].then(*tokens)
        if events := self._events.delta(choice, deltas, unsent):
            self._unsent[choice] = NO_TOKENS
            await self.send_events(events)

    async def finish_choice(self, choice: int, step: Step) -> None:
        """Ends a choice, which is now durable."""
        if self._events is not None:
            await self.send_events(self._events.finish_choice(choice, step, self._unsent[choice]))

    async def finish(self, prompt: Prompt, steps: list[Step]) -> None:
        """Ends the response, after all choices; `steps` are in their order."""
        if self._events is not None:
            await self.send_events(self._events.finish(steps), last=True)
        else:
            await self.send_body(200, self._dialect.json_body(self._answer(prompt, steps)))

    @property
    def _is_stream(self) -> bool:
        return self._call is not None and self._call.stream

    def _answer(self, prompt: Prompt, steps: Sequence[Step] = ()) -> ModelAnswer:
        assert self._call is not None, "`begin` comes first"
        return ModelAnswer(self.name, self.created, self._model, self._call, prompt, list(steps))

    async def send_body(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = (JSON_TYPE,)) -> None:
        """Send a response that is not streamed."""
        length = (b"content-length", b"%d" % len(body))
        await self._write({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        self.complete = status == 200
        await self._write({"type": "http.response.body", "body": body})

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send a part of a stream; the first part starts it."""
        if not self.sent:
            await self._write(STREAM_START)
        self.complete = last
        await self._write({"type": "http.response.body", "body": events, "more_body": not last})

    async def send_error(self, error: RequestError) -> None:
        """Send an error as the response, or as the last event of a stream that has started (without its end mark)."""
        # Its traceback leads to the request's body, and through the summary back to the error: a cycle that would keep the body.
        self.summary.error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        if self.sent:
            await self.send_events(self._dialect.error_event(error), last=True)
            self.complete = False
            return
        retryable = error.status in RETRYABLE_STATUSES
        headers = (JSON_TYPE, (b"x-should-retry", b"true" if retryable else b"false"))
        body = orjson.dumps(self._dialect.error(error))
        await self.send_body(error.status, body, (*headers, (b"retry-after", retry_after(error))) if retryable else headers)

    @property
    def status(self) -> str:
        """The HTTP status; `left` where the caller hung up before the response began."""
        return str(self.sent[0]["status"]) if self.sent else "left"

    def remove_listener(self) -> None:
        """A caller hung up. After the last one, the task that answers is cancelled."""
        self._listeners -= 1
        if self.is_abandoned() and self._task is not None:
            self._task.cancel()

    def is_abandoned(self) -> bool:
        return self._listeners <= 0

    async def follow(self, send: Send) -> None:
        """Send the response to one more caller, from the first byte until its end."""
        self._listeners += 1
        self._changed = self._changed or asyncio.Event()
        position = 0
        while position < len(self.sent) or not self._ended:
            for message in self.sent[position:]:
                await send(message)
                position += 1
            if not self._ended:
                self._changed.clear()
                await self._changed.wait()

    def end(self) -> None:
        """Nothing more is sent; the response may be incomplete."""
        self._ended = True
        self._task = None
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()
        if self._changed is not None:
            self._changed.set()

    async def _write(self, message: AsgiMessage) -> None:
        self.sent.append(message)
        if self._timer is not None:
            self._last_write = asyncio.get_running_loop().time()
        if self._changed is not None:
            self._changed.set()
        try:
            await self._send(message)
        except OSError:
            return  # the caller hung up; a retry may still want the rest

    def _tick(self, every_s: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._last_write >= every_s:
            self._last_write = now
            if self._pinging is None or self._pinging.done():  # one ping that waits for a slow reader is enough
                self._pinging = loop.create_task(self._ping())
        self._timer = loop.call_at(self._last_write + every_s, self._tick, every_s)

    async def _ping(self) -> None:
        if not self.sent:
            await self._write(STREAM_START)
        await self._write({"type": "http.response.body", "body": self._dialect.ping, "more_body": True})


class CachedResponse(NamedTuple):
    start: AsgiMessage
    body: bytes

    @classmethod
    def of(cls, sent: list[AsgiMessage]) -> "CachedResponse":
        start, *parts = sent
        # The empty part makes `join` copy: what orjson wrote keeps a buffer that is many times as large.
        return cls(start, b"".join([b"", *(part["body"] for part in parts)]))

    @property
    def messages(self) -> list[AsgiMessage]:
        return [self.start, {"type": "http.response.body", "body": self.body}]

    @property
    def weight(self) -> int:
        """Bytes of memory: of the body, and of the objects around it."""
        return len(self.body) + 1000


class ResponseCache:
    """The last complete responses, by request digest. A retry whose response was lost gets the same bytes."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        # An OrderedDict: finding the oldest entry of a plain dict gets slower with every deletion before it.
        self._responses = OrderedDict[str, CachedResponse]()

    def add(self, response: PendingResponse) -> None:
        """Keep a complete response; evicts the oldest ones."""
        if not response.complete:
            return
        if (before := self._responses.pop(response.request, None)) is not None:
            self._bytes -= before.weight
        cached = self._responses[response.request] = CachedResponse.of(response.sent)
        self._bytes += cached.weight
        while self._bytes > self._max_bytes:
            self._bytes -= self._responses.popitem(last=False)[1].weight

    def get(self, request: str) -> list[AsgiMessage] | None:
        cached = self._responses.get(request)
        return cached and cached.messages
