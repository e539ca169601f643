"""A vLLM server that is none: real HTTP on a free port, made-up tokens, and a script of what goes wrong.

async with FakeVllm([Act(status=429), Act(cut_after=3)]) as server, engine_over(server) as engine:
    ...  # the first request is refused, the second breaks off after three events, all further ones are served

Each act is for one request to `/v1/completions`, in their order; later requests are served well.
"""

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from penstock.engines.retry import RetryPolicy
from penstock.engines.servers.base import RemoteModel
from penstock.engines.servers.vllm import VllmEngine, VllmSection, open_engine
from penstock.http.client import RequestTimeouts

CONTEXT = 4096
MODEL = "made-up"
QUICK = RetryPolicy(first_wait_s=0.0, recheck_s=0.0)
"""Waits for nothing."""

Edit = Callable[[list[bytes]], list[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """How one request is answered."""

    status: int = 200
    words: str = "made-up trouble"
    """Of the error, where `status` is one."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    edit: Edit = list
    """What is done to the events before they are sent; one token an event, `[DONE]` last."""
    reset: bool = False
    """Reset the connection before a single byte."""
    cut_after: int | None = None
    """Reset the connection after so many events."""
    end_after: int | None = None
    """End the answer in good order after so many events."""
    stall_after: int | None = None
    """After so many events wait for `release`."""
    split: int | None = None
    """Send so many bytes at a time."""


class FakeVllm:
    """The server. `processed` is its `--logprobs-mode`; one that is `trainable` runs in vLLM's development mode."""

    def __init__(
        self, acts: Iterable[Act] = (), *, processed: bool = True, context: int = CONTEXT, key: str = "", trainable: bool = True
    ) -> None:
        self.acts = deque(acts)
        self.trainable = trainable
        self.device, self.vocabulary = "cuda", 60
        self.refuses = False
        """Whether it fails to read weights."""
        self.calls: list[str] = []
        """What it was asked to do about its weights."""
        self.confesses = False
        """Whether every log-probability says what it holds: -(number + 1), the number being the last part of the folder's name."""
        self.processed, self.context, self.key = processed, context, key
        self.otherwise = Act()
        """For requests after the last act."""
        self.healthy = True
        self.requests: list[dict[str, Any]] = []
        """The bodies of all streamed requests."""
        self.running = 0
        self.gone = asyncio.Event()
        """Set when a caller hung up before its reply was complete."""
        self.stalled = asyncio.Event()
        """Set when a reply stalls."""
        self.asked = asyncio.Event()
        """Set when the health of the server is asked for."""
        self._released = asyncio.Event()
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.connections: set[asyncio.Transport] = set()
        """All that streamed requests came over."""
        self._port = 0
        self.forget()

    def forget(self) -> None:
        """What a restart does to it."""
        self.label, self.held = "default", 0
        self._running = asyncio.Event()
        self._running.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        if self.trainable:
            for path in ("pause", "resume", "collective_rpc", "reset_prefix_cache", "update_weight_version"):
                app.router.add_post(f"/{path}", self._change)
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_get("/server_info", self._server_info)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Reset every connection and refuse new ones."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for transport in self.connections:
                transport.abort()
            self.connections.clear()
            await runner.cleanup()

    def release(self) -> None:
        """Let stalled replies go on, and stall none from now on."""
        self._released.set()

    async def until_running(self, count: int) -> None:
        """Wait until so many requests are being answered."""
        while self.running != count:
            self._changed.clear()
            await self._changed.wait()

    async def _health(self, request: web.Request) -> web.Response:
        self.asked.set()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.context, "parent": None}]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {"device_config": {"device": self.device}}})

    async def _change(self, request: web.Request) -> web.Response:
        call, body = request.path[1:], await request.json()
        self.calls.append(call)
        if call == "pause":
            assert request.query["mode"] == "keep"
            self._running.clear()
        elif call == "resume":
            self._running.set()
        elif call == "collective_rpc":
            if self.refuses:
                return trouble(500, "Call to collective_rpc method failed")
            name = Path(body["kwargs"]["weights_path"]).name
            self.held = int(name) if name.isdecimal() else 0
        elif call == "update_weight_version":
            self.label = body["new_version"]
        return web.json_response({"success": True})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return trouble(401, f"wrong key, got {request.headers.get('authorization')}")
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return trouble(400, f"This model's maximum context length is {self.context} tokens. However, you asked for more.")
        if max(body["prompt"]) == self.vocabulary:
            return trouble(400, f"Token id {self.vocabulary} is out of vocabulary")
        events = self._events(body)
        if not body["stream"]:
            return web.json_response({"choices": [json.loads(events[0][6:])["choices"][0]]})
        self.requests.append(body)
        act = self.acts.popleft() if self.acts else self.otherwise
        assert request.transport is not None
        self.connections.add(request.transport)
        self._count(1)
        try:
            return await self._play(request, act, events)
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone.set()
            raise
        finally:
            self._count(-1)

    async def _play(self, request: web.Request, act: Act, events: list[bytes]) -> web.StreamResponse:
        assert request.transport is not None
        if act.reset:
            request.transport.abort()
            return web.Response()
        if act.status != 200:
            return trouble(act.status, act.words, act.headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for place, event in enumerate([*act.edit(events), None]):
            if act.stall_after == place:
                self.stalled.set()
                await self._released.wait()
            if act.cut_after == place:
                request.transport.abort()
            if act.end_after == place or event is None:
                break
            await self._running.wait()
            event = self._confessing(event) if self.confesses else event
            for start in range(0, len(event), act.split or len(event)):
                await response.write(event[start : start + (act.split or len(event))])
                await asyncio.sleep(0)
        await response.write_eof()
        return response

    def _confessing(self, event: bytes) -> bytes:
        if event.startswith(b"data: [DONE]"):
            return event
        return edited(0, logprobs={"token_logprobs": [-float(self.held + 1)]})([event])[0]

    def _count(self, change: int) -> None:
        self.running += change
        self._changed.set()

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        """The whole reply to a request."""
        prompt, most = body["prompt"], body["max_tokens"]
        rng = random.Random(str(body.get("seed", len(self.requests))) + str(prompt))
        ids = [rng.randrange(1, 58) for _ in range(most)]
        stops = [place for place, token_id in enumerate(ids) if token_id in body["stop_token_ids"]]
        finish = "stop" if stops else "length"
        ids = ids[: stops[0] + 1] if stops else ids
        chunks = [self._chunk(token_id, place, body) for place, token_id in enumerate(ids)]
        chunks[0]["prompt_token_ids"] = prompt
        chunks[-1]["finish_reason"] = finish
        return [event({"choices": [chunk]}) for chunk in chunks] + [b"data: [DONE]\n\n"]

    def _chunk(self, token_id: int, place: int, body: dict[str, Any]) -> dict[str, Any]:
        full = -((token_id * 7919 + place * 104_729) % 4096 + 1) / 1024
        tempered = body["temperature"] not in (0.0, 1.0) or body["top_p"] < 1.0
        seen = full if not self.processed else 0.0 if body["top_k"] == 1 else full / 2 if tempered else full
        logprobs = {"token_logprobs": [seen], "tokens": ["é"], "text_offset": [place], "top_logprobs": [{"é": seen}]}
        return {"index": 0, "text": "é", "logprobs": logprobs, "finish_reason": None, "token_ids": [token_id]}


@asynccontextmanager
async def engine_over(
    *servers: FakeVllm, policy: RetryPolicy = QUICK, timeouts: RequestTimeouts | None = None, key: str = "", folder: Path = Path()
) -> AsyncIterator[VllmEngine]:
    """An engine whose servers are believed to be well."""
    urls, served = [server.url for server in servers], RemoteModel(MODEL, servers[0].context, servers[0].processed)
    engine = VllmEngine(urls, name=MODEL, served=served, folder=folder, timeouts=timeouts, policy=policy, key=key)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def opened(urls: Sequence[str], folder: Path = Path(), **fields: Any) -> AsyncIterator[VllmEngine]:
    """An engine opened as a run opens it."""
    section = VllmSection(name="vllm", url=tuple(urls), **fields)
    engine = await asyncio.to_thread(open_engine, folder, name=MODEL, section=section, seed=0)
    try:
        yield engine
    finally:
        await engine.close()


def event(payload: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def trouble(status: int, words: str, headers: dict[str, str] | None = None) -> web.Response:
    """An error as vLLM words it."""
    return web.json_response({"error": {"message": words, "type": "trouble", "code": status}}, status=status, headers=headers)


def replaced(place: int, by: bytes) -> Edit:
    """An edit that puts `by` in place of one event."""
    return lambda events: [*events[:place], by, *events[place + 1 :]]


def edited(place: int, **fields: Any) -> Edit:
    """An edit that changes fields of one event's choice."""

    def edit(events: list[bytes]) -> list[bytes]:
        payload = json.loads(events[place][6:])
        payload["choices"][0].update(fields)
        return [*events[:place], event(payload), *events[place + 1 :]]

    return edit
