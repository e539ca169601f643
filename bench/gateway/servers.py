"""The servers that are compared, each in a process of its own: `python -m bench.gateway.servers KIND ARGUMENTS`."""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.chat.renderer import Renderer
from penstock.engines.base import SampledChunk
from penstock.gateway import Gateway, GatewayLimits
from penstock.pool import POOLS
from penstock.records import Sampling, Task, make_rollout
from penstock.system.processes import relax_gc
from penstock.testing import ScriptedEngine, write_tokenizer

SECRET = b"a secret for benchmarks"
CALLERS = 4096
REPLY_TOKENS = 200
SAID = "the next thing comes because the one before it did, as it always has, "


QUESTION = "Then tell me what comes next, and why it does, in a few plain words. " * 3
FILLER = "because the thing before it came as it always has, "
CORPUS = [SAID * 20, QUESTION * 20, FILLER * 20]
"""So that words are tokens, about as many as in a real vocabulary."""


class Pace:
    """How long the engine takes, read off the call's seed: whole replies after some milliseconds, streams token by token."""

    def __init__(self, seed: int) -> None:
        self.wait_s, self.between_s = (seed // 1000) / 1000, (seed % 1000) / 1000


class ReadyEngine(ScriptedEngine):
    """Samples the same tokens whenever it is asked."""

    def answer(self, ids: list[int]) -> None:
        """What it samples from now on."""
        self._ids = ids
        self._whole = self._sampled(ids, "stop")
        self._parts = [self._sampled([each], None) for each in ids[:-1]] + [self._sampled(ids[-1:], "stop")]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        pace = Pace(sampling.seed or 0)
        if pace.wait_s:
            await asyncio.sleep(pace.wait_s)
        if not pace.between_s:
            yield self._whole
            return
        for part in self._parts:
            await asyncio.sleep(pace.between_s)
            yield part

    def _sampled(self, ids: list[int], finish: Any) -> SampledChunk:
        logprobs = tuple(-0.5 for _ in ids)
        return SampledChunk(tuple(ids), logprobs, logprobs, tuple(0 for _ in ids), finish)


async def serve_gateway(folder: str) -> None:
    """Our gateway with its own SQLite pool: every step is on disk before its last byte."""
    async with await make_gateway(Path(folder)) as gateway:
        await say_and_wait(gateway.base_url)


async def make_gateway(folder: Path) -> Gateway:
    """A gateway in front of an engine that answers at once."""
    model, store = write_tokenizer(folder / "model", corpus=CORPUS, vocab_size=600), folder / "pool"
    renderer, pool = Renderer.load(model), POOLS.load("sqlite")(store)
    rollouts = [make_rollout("train-0", "t", place) for place in range(CALLERS)]
    await pool.open_group(Task(id="t", prompt=({"role": "user", "content": "?"},)), rollouts, seq=0)
    engine = ReadyEngine([], renderer.tokenizer)
    engine.answer(renderer.tokenizer.encode(SAID * 50)[: REPLY_TOKENS - 1] + list(renderer.stop_ids[:1]))
    return Gateway(
        engine,
        renderer,
        pool,
        secret=SECRET,
        sampling={"train": Sampling(max_tokens=1024)},
        limits=GatewayLimits(calls_per_s=1e9),
    )


async def serve_proxy(upstream: str) -> None:
    """Bytes in, bytes out: Starlette, uvicorn and aiohttp."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def forward(request: Request) -> Response:
            body = await request.body()
            answer = await http.post(f"{upstream}/chat/completions", data=body, headers={"content-type": "application/json"})
            if answer.content_type == "application/json":
                return Response(await answer.read(), media_type="application/json")
            return StreamingResponse(answer.content.iter_any(), media_type="text/event-stream")

        await serve(Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])]))


async def serve_upstream() -> None:
    """The same answer to every call, at the pace that its seed asks for."""
    message = {"role": "assistant", "content": SAID * 10}
    usage = {"prompt_tokens": 540, "completion_tokens": REPLY_TOKENS, "total_tokens": 740}
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    whole = orjson.dumps(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
    delta: dict[str, Any] = {"index": 0, "delta": {"content": "the "}, "finish_reason": None, "logprobs": None}
    event = b"data: " + orjson.dumps(head | {"choices": [delta]}) + b"\n\n"

    async def events(pace: Pace) -> AsyncIterator[bytes]:
        for _ in range(REPLY_TOKENS):
            await asyncio.sleep(pace.between_s)
            yield event
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        asked = orjson.loads(await request.body())
        pace = Pace(asked.get("seed", 0))
        if pace.wait_s:
            await asyncio.sleep(pace.wait_s)
        return (
            StreamingResponse(events(pace), media_type="text/event-stream")
            if asked.get("stream")
            else Response(whole, media_type="application/json")
        )

    await serve(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]))


async def serve(app: ASGIApp) -> None:
    """Serve as uvicorn does by itself, but keep connections that are idle for a while."""
    config = uvicorn.Config(
        app, port=0, log_config=None, access_log=False, lifespan="off", ws="none", backlog=4096, timeout_keep_alive=600
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    await say_and_wait(f"http://127.0.0.1:{port}/v1")


async def say_and_wait(url: str) -> None:
    """Tell the parent where we are, then serve until it kills us."""
    print(url, flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def serving(*arguments: str) -> AsyncGenerator[tuple[str, psutil.Process], None]:
    """One of the servers in a process of its own, with the address that it prints."""
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "bench.gateway.servers", *arguments]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        yield (await asyncio.wait_for(server.stdout.readline(), 60)).decode().strip(), psutil.Process(server.pid)
    finally:
        server.kill()
        await server.wait()


SERVERS = {
    "gateway": serve_gateway,
    "proxy": serve_proxy,
    "upstream": serve_upstream,
}


def main(kind: str, *arguments: str) -> None:
    """Serve until killed."""
    relax_gc()  # as `penstock gateway` does; the others get it too
    asyncio.run(SERVERS[kind](*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
