"""What the gateway's fault tests share: a pool with a gate, and a caller that shows what it got and can hang up at any moment."""

import asyncio
import json

from penstock.errors import PoolError
from penstock.system.async_tools import finish_shielded

USER = {"role": "user", "content": "What is 6 times 7?"}
RETRY = (b"x-stainless-retry-count", b"1")


class GatedPool:
    """A pool whose appends wait at a gate, or are refused."""

    def __init__(self, inner):
        self.inner = inner
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = asyncio.Event()
        self.full = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def append(self, step, node):
        await finish_shielded(self._append(step, node))

    async def _append(self, step, node):
        self.waiting.set()
        await self.open.wait()
        if self.full:
            raise PoolError("the disk is full; make room")
        await self.inner.append(step, node)


class Client:
    """One raw ASGI request: shows what was sent at any moment, and can hang up."""

    def __init__(self, gateway, session, *, headers=(), path="/v1/chat/completions", **fields):
        self.sent = []
        self._gone = asyncio.Event()
        self._body = json.dumps({"model": "any", "messages": [USER]} | fields).encode()
        self._heard = asyncio.Event()
        token = (b"authorization", f"Bearer {session.token}".encode())
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), token, *headers],
            "http_version": "1.1",
        }
        self.task = asyncio.create_task(gateway.app(scope, self._receive, self._send))

    def hang_up(self):
        self._gone.set()

    async def answer(self):
        await asyncio.wait_for(self.task, 20)
        return self.status, self.body

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)

    async def _receive(self):
        if self._body is None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def heard(self, parts):
        """Wait until that many parts of the answer have come."""
        while len(self.sent) < parts and not self.task.done():
            self._heard.clear()
            await self._heard.wait()

    async def _send(self, message):
        self.sent.append(message)
        self._heard.set()
