"""A rollout server without an agent: it sends what a test asks for, over real HTTP."""

import asyncio
import contextlib

import aiohttp
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock.http.listen import bind
from penstock.http.server import HttpServer


class Double:
    """Accepts every rollout that `refusals` lets through, then does `act(double, request)`."""

    def __init__(self, act=None, *, refusals=(), token="", state=None, health=200, separate_keys=True):
        self.act, self.refusals, self.token, self.state, self.health = act, list(refusals), token, state, health
        self.separate_keys = separate_keys
        self.requests, self.cancelled, self.asked = [], [], []
        self.took = asyncio.Event()
        self.was_cancelled = asyncio.Event()
        self.polled = asyncio.Event()
        self.url = ""
        self._tasks = set()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/rollout", self._rollout, methods=["POST"]),
                Route("/rollout/cancel", self._cancel, methods=["POST"]),
                Route("/rollout/{rollout_id}/status", self._status),
            ]
        )

    @contextlib.asynccontextmanager
    async def serving(self):
        sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with HttpServer(self.app, sock, drain_s=1, reader_s=20), aiohttp.ClientSession() as self._session:
            yield self
            for task in self._tasks:
                task.cancel()
            await asyncio.wait({*self._tasks, asyncio.ensure_future(asyncio.sleep(0))})

    async def complete(self, request, status="success", *, key=None, **fields):
        """Call back that the workflow has ended; the status and body of the answer."""
        body = {"rollout_id": request["rollout_id"], "status": status, **fields}
        return await self.post(request["completion_callback_url"], body, key or request["controller_api_key"])

    async def grade(self, request, status="success", *, key=None, **fields):
        """Call back that the grader has."""
        body = {"rollout_id": request["rollout_id"], "status": status, **fields}
        return await self.post(request["grader_callback_url"], body, key or request["controller_api_key"])

    async def post(self, url, body, key):
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self._session.post(url, headers={"authorization": f"Bearer {key}"}, **sent) as response:
            return response.status, await response.json()

    async def _health(self, request):
        return JSONResponse({"status": "ok"} | ({"separate_keys": True} if self.separate_keys else {}), self.health)

    async def _rollout(self, request):
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": {"message": "who are you?"}}, 401)
        body = await request.json()
        self.asked.append(body["rollout_id"])
        if self.refusals:
            status, headers = self.refusals.pop(0)
            return JSONResponse({"error": {"message": f"not now: {status}"}}, status, headers)
        if body["rollout_id"] not in [each["rollout_id"] for each in self.requests]:
            self.requests.append(body)
            self.took.set()
            if self.act is not None:
                self._tasks.add(asyncio.ensure_future(self.act(self, body)))
        return JSONResponse({})

    async def _cancel(self, request):
        self.cancelled += (await request.json())["ids"]
        self.was_cancelled.set()
        return JSONResponse({})

    async def _status(self, request):
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": {"message": "who are you?"}}, 401)
        self.polled.set()
        return JSONResponse({"rollout_id": request.path_params["rollout_id"], "status": self.state or "unknown", "message": None})


async def good(double, request):
    """A workflow and a grader that end well."""
    await double.complete(request)
    await double.grade(request, samples={"main": {"id": "main", "reward": 1.0}})
