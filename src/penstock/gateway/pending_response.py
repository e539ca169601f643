"""One answer on its way: to the caller who asked, and to those who asked again before it had arrived.

Everything sent is kept until the answer is complete, so that a retry that joins late gets it from the first byte on; complete
answers are remembered for a while, so that a retry that comes after gets the same bytes.
"""

import asyncio
import time
from collections import OrderedDict

import orjson
from starlette.types import Message as AsgiMessage
from starlette.types import Send

from penstock.errors import RequestError
from penstock.gateway.call import Account
from penstock.gateway.dialects.base import Dialect

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
AGAIN = (429, 502, 503)
"""Statuses after which the same call may be sent again, in a second."""
RETRY_AFTER_S = b"1"


class PendingResponse:
    """What is sent of one answer. What cannot be sent because the caller hung up is only kept."""

    def __init__(self, request: str, dialect: Dialect, send: Send) -> None:
        self.request = request
        """Digest of the request, whose and from which transcript."""
        self.name = ""
        """Of the answer, once it is begun."""
        self.created = time.time()
        self.sent: list[AsgiMessage] = []
        self.complete = False
        """Whether the answer is whole and not a refusal."""
        self.account = Account()
        self._dialect = dialect
        self._send = send
        self._listeners = 1
        self._over = False
        self._grown: asyncio.Event | None = None
        self._carrier = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._last_write = 0.0

    async def whole(self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = (JSON,)) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self._write({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        self.complete = status == 200
        await self._write({"type": "http.response.body", "body": body})

    async def part(self, body: bytes, *, last: bool = False) -> None:
        """More of a stream, which the first part begins."""
        if not self.sent:
            await self._write(BEGIN_STREAM)
        self.complete = last
        await self._write({"type": "http.response.body", "body": body, "more_body": not last})

    @property
    def status(self) -> str:
        """Of the answer; `left` where the caller hung up before it began."""
        return str(self.sent[0]["status"]) if self.sent else "left"

    async def refuse(self, error: RequestError) -> None:
        """An error: as the answer, or as the last event of a stream that has begun, which then has no end mark."""
        self.account.error = error
        if self.sent:
            await self.part(self._dialect.broken(error), last=True)
            self.complete = False
            return
        again = error.status in AGAIN
        headers = (JSON, (b"x-should-retry", b"true" if again else b"false"))
        body = orjson.dumps(self._dialect.error(error))
        await self.whole(error.status, body, (*headers, (b"retry-after", RETRY_AFTER_S)) if again else headers)

    def keep_alive(self, every_s: float) -> None:
        """From now on, send an event that says nothing whenever that long nothing else was sent."""
        loop = asyncio.get_running_loop()
        self._last_write = self._last_write or loop.time()
        self._timer = loop.call_at(self._last_write + every_s, self._tick, every_s)

    def leave(self) -> None:
        """One caller fewer; with the last one, the task that carries the answer is cancelled."""
        self._listeners -= 1
        if self.is_given_up() and self._carrier is not None:
            self._carrier.cancel()

    def is_given_up(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._listeners <= 0

    async def follow(self, send: Send) -> None:
        """Send everything to one more caller, from the first byte on, until the answer is over."""
        self._listeners += 1
        self._grown = self._grown or asyncio.Event()
        place = 0
        while place < len(self.sent) or not self._over:
            for message in self.sent[place:]:
                await send(message)
                place += 1
            if not self._over:
                self._grown.clear()
                await self._grown.wait()

    def land(self) -> None:
        """The answer is over, whole or not."""
        self._over = True
        self._carrier = None
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()
        if self._grown is not None:
            self._grown.set()

    async def _write(self, message: AsgiMessage) -> None:
        self.sent.append(message)
        if self._timer is not None:
            self._last_write = asyncio.get_running_loop().time()
        if self._grown is not None:
            self._grown.set()
        try:
            await self._send(message)
        except OSError:
            return

    def _tick(self, every_s: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._last_write >= every_s:
            self._last_write = now
            if self._pinging is None or self._pinging.done():  # one that waits for a slow reader is enough
                self._pinging = loop.create_task(self._ping())
        self._timer = loop.call_at(self._last_write + every_s, self._tick, every_s)

    async def _ping(self) -> None:
        if not self.sent:
            await self._write(BEGIN_STREAM)
        await self._write({"type": "http.response.body", "body": self._dialect.ping, "more_body": True})


BEGIN_STREAM: AsgiMessage = {
    "type": "http.response.start",
    "status": 200,
    "headers": [EVENTS, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
}


class ResponseCache:
    """The last complete answers as they were sent, by request: a retry whose answer got lost gets the same bytes."""

    def __init__(self, most_bytes: int = 32 << 20) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._answers = OrderedDict[str, list[AsgiMessage]]()  # the oldest of a plain dictionary is found ever more slowly

    def keep(self, flight: PendingResponse) -> None:
        """Remember a complete answer; the oldest ones make room."""
        if not flight.complete:
            return
        self._forget(flight.request)
        self._answers[flight.request] = flight.sent
        self._bytes += _size(flight.sent)
        while self._bytes > self._most_bytes:
            self._bytes -= _size(self._answers.popitem(last=False)[1])

    def find(self, request: str) -> list[AsgiMessage] | None:
        """What was sent in answer to a request; None where that is not known any more."""
        return self._answers.get(request)

    def _forget(self, request: str) -> None:
        self._bytes -= _size(self._answers.pop(request, []))


def _size(messages: list[AsgiMessage]) -> int:
    return sum(len(message.get("body", b"")) + 500 for message in messages)
