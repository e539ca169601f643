"""Endpoints for the tests of text endpoints: our own gateway in front of an engine, and a server that misbehaves as it received."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

from aiohttp import web

from penstock.chat.renderer import Renderer
from penstock.engines import ENGINES, SECTIONS
from penstock.engines.text_endpoints.base import TextChunk, TextEndpoint, TextRequest
from penstock.gateway import Session
from penstock.records import Rollout, Sampling
from penstock.testing import GatewayFixture, workbench

T = TypeVar("T")

KEY = "ENDPOINT_TEST_KEY"
"""The environment variable that holds the endpoint's key."""


def open_endpoint(kind: str, url: str, *, key: str | None = KEY, **fields: Any) -> TextEndpoint:
    """The engine of this name, for the model `far`."""
    section = SECTIONS.load(kind)(name=kind, url=url, api_key_env=key, **fields)
    return ENGINES.load(kind)("", name="far", section=section, seed=0)


def base_url(kind: str, served: str) -> str:
    """As each vendor's clients take it."""
    return served if kind == "openai" else served.removesuffix("/v1")


class Both(NamedTuple):
    """A gateway in front of an endpoint, which is another gateway of ours."""

    bench: GatewayFixture
    session: Session
    """Of the rollout whose agent calls."""
    far: GatewayFixture
    far_session: Session

    async def attempt(self) -> Rollout:
        return await self.bench.pool.rollout(self.session.rollout_id)

    async def far_attempt(self) -> Rollout:
        return await self.far.pool.rollout(self.far_session.rollout_id)


@asynccontextmanager
async def gateway_before(kind: str, engine: Any, renderer: Renderer, set_key: Callable[[str, str], None]) -> AsyncGenerator[Both]:
    """An agent's gateway in front of an endpoint, which is a gateway of ours in front of `engine`."""
    async with workbench(engine, renderer, serves=True) as far:
        far_session = await far.rollout(sampling=Sampling(max_tokens=300))
        set_key(KEY, far_session.token)
        endpoint = open_endpoint(kind, base_url(kind, far_session.base_url))
        try:
            async with workbench(endpoint, None, serves=True) as bench:
                yield Both(bench, await bench.rollout(sampling=Sampling(max_tokens=200)), far, far_session)
        finally:
            await endpoint.close()


def chunk(delta: dict[str, Any] | None = None, **more: Any) -> bytes:
    """One event of a chat completion."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": more.pop("finish_reason", None)}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


WELL = (
    chunk({"role": "assistant", "content": "4"}) + chunk({"content": "2"}, finish_reason="stop")
    + chunk(usage={"prompt_tokens": 7, "completion_tokens": 2}) + b"data: [DONE]\n\n"
)  # fmt: skip


def message_stream(*blocks: dict[str, Any], stop: str = "end_turn") -> bytes:
    """The events of a message of Anthropic's API with these content blocks; each text comes in one delta."""
    usage = {"input_tokens": 7, "output_tokens": 2}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"usage": usage}}]
    for index, block in enumerate(blocks):
        deltas = {"text": "text_delta", "thinking": "thinking_delta", "signature": "signature_delta"}
        empty = {key: "" if key in deltas else value for key, value in block.items()}
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        for key in [each for each in deltas if each in block] if block["type"] != "tool_use" else ():
            events.append({"type": "content_block_delta", "index": index, "delta": {"type": deltas[key], key: block[key]}})
        events.append({"type": "content_block_stop", "index": index})
    events += [{"type": "message_delta", "delta": {"stop_reason": stop}, "usage": usage}, {"type": "message_stop"}]
    return b"".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in events)


class Answer(NamedTuple):
    """How one request is answered."""

    body: bytes = WELL
    status: int = 200
    headers: MappingProxyType[str, str] | dict[str, str] = MappingProxyType({})
    hangs: bool = False
    """Never say anything more."""


class Endpoint:
    """A server that answers one request after another as it received, and `WELL` after the last."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        """Where they went, after `/v1/`."""
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.lists = Answer(b"", 404)
        """How it answers who asks for its models."""
        self._left = asyncio.Event()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/{path:.*}", self._answer)
        app.router.add_get("/v1/models", self._list)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left.set()
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        return web.Response(status=self.lists.status, body=self.lists.body)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.paths.append(request.match_info["path"])
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        reported = self._answers.pop(0) if self._answers else Answer()
        response = web.StreamResponse(status=reported.status, headers={"content-type": "text/event-stream", **reported.headers})
        await response.prepare(request)
        await response.write(reported.body)
        if reported.hangs:
            await self._left.wait()
        await response.write_eof()
        return response


@contextmanager
def in_thread(opened: Callable[[], AbstractAsyncContextManager[T]]) -> Generator[T]:
    """What an async context gives, held open on its own loop while this thread does as it likes."""
    found: Future[T] = Future()
    over = threading.Event()

    async def hold() -> None:
        try:
            async with opened() as value:
                found.set_result(value)
                await asyncio.to_thread(over.wait)
        except BaseException as error:
            if found.done():
                raise
            found.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=(hold(),))
    thread.start()
    try:
        yield found.result(120)
    finally:
        over.set()
        thread.join(60)


async def all_chunks(endpoint: TextEndpoint, **asked: Any) -> list[TextChunk]:
    """All that comes of one request; the endpoint is closed."""
    try:
        request = TextRequest(messages=[{"role": "user", "content": "6 times 7?"}], sampling=Sampling(max_tokens=9), **asked)
        return [chunk async for chunk in endpoint.complete(request)]
    finally:
        await endpoint.close()


@asynccontextmanager
async def gateway_to(far: Endpoint, kind: str = "openai") -> AsyncGenerator[GatewayFixture]:
    """An agent's gateway in front of a server of this kind."""
    endpoint = open_endpoint(kind, base_url(kind, far.url))
    try:
        async with workbench(endpoint, None) as bench:
            yield bench
    finally:
        await endpoint.close()
