"""A server on a real socket, and callers that speak to it byte by byte."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import NamedTuple

from penstock.http.server import HttpServer

DEADLINE_S = 30


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self):
        return json.loads(self.body)["error"]["code"]


class Caller:
    """One connection."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    async def say(self, *parts):
        """Each part alone: the server reads it before the next is sent."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await turns()

    async def answer(self, *, bodiless=False):
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        return Answer(int(head[0].split(" ")[1]), headers, b"" if bodiless else await self._body(headers))

    async def ask(self, *parts):
        await self.say(*parts)
        return await self.answer()

    async def rest(self):
        """All until the server closes."""
        return await self.reader.read()

    def hang_up(self):
        self.writer.close()

    def reset(self):
        """Go without a word, as a killed process does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()

    async def _body(self, headers):
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if "transfer-encoding" not in headers:
            return await self.rest()
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append((await self.reader.readexactly(size + 2))[:-2])
        assert await self.reader.readuntil(b"\r\n") == b"\r\n"
        return b"".join(parts)


class Site:
    """A running server, and those who call it."""

    def __init__(self, address):
        self.address = address
        self.callers = []

    async def call(self, *, receive_bytes=None):
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self.address)
        except OSError:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.callers.append(Caller(*await asyncio.open_connection(sock=sock, limit=2**20)))
        return self.callers[-1]


@asynccontextmanager
async def serving(app, *, drain_s=10.0, reader_s=20.0):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    site = Site(sock.getsockname())
    try:
        async with HttpServer(app, sock, drain_s=drain_s, reader_s=reader_s):
            yield site
    finally:
        for caller in site.callers:
            caller.writer.transport.abort()


def run(main):
    """Run it with a deadline; the server must leave no task behind."""

    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            await main()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            await turns()  # in which the callers' transports close

    asyncio.run(bounded())


async def turns(count=3):
    for _ in range(count):
        await asyncio.sleep(0)


async def read(receive):
    """The body, and whether it was whole."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(parts), False
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts), True


async def reply(send, body, status=200, headers=()):
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body)), *headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope, receive, send):
    body, whole = await read(receive)
    if whole:
        reported = {key: str(scope[key]) for key in ("method", "path", "http_version")}
        await reply(send, json.dumps(reported | {"body": body.decode("latin-1"), "headers": len(scope["headers"])}).encode())


async def stream(scope, receive, send):
    await read(receive)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for part in (b"one", b"", b"two", b"three"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


GET = b"GET /path HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST /path HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nhel\r\n2\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
