"""The gateway against a proxy that only passes bytes on: calls per second and processor time per call, in one run.

Both answer the same calls over loopback to the same load generator. The gateway renders, matches, records every step in SQLite with
an fsync before the last byte, and answers from an engine in its own process that samples 200 tokens at once; the proxy (Starlette
and aiohttp) forwards the call to a server that sends a ready-made answer of that size. So the ratio says what durable,
token-exact recording costs over doing nothing.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.engines.base import Sampled
from penstock.gateway import Gateway
from penstock.gateway.auth import Tokens
from penstock.pool import POOLS
from penstock.records import Sampling, Task, make_rollout
from penstock.render.renderer import Renderer
from penstock.testing import ScriptedEngine, write_tokenizer

SECONDS, REPEATS, CALLERS, TURNS = 1.2, 2, 32, 8
SECRET = b"a secret for benchmarks"
SYSTEM = {"role": "system", "content": "You are a careful assistant who answers in one short sentence. " * 30}
QUESTION = {"role": "user", "content": "Then tell me what comes next, and why it does, in a few plain words. " * 3}
SAID = "the next thing comes because the one before it did, as it always has, "


class ReadyEngine(ScriptedEngine):
    """Samples the same tokens whenever it is asked, at once."""

    def answer(self, ids: list[int]) -> None:
        """What it samples from now on."""
        logprobs = tuple(-0.5 for _ in ids)
        self._answer = Sampled(tuple(ids), logprobs, logprobs, tuple(0 for _ in ids), "stop")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[Sampled, None]:
        """See `Engine.generate`."""
        yield self._answer


class Rate(NamedTuple):
    """What one server managed."""

    calls_per_second: float
    cpu_us_per_call: float


def main() -> None:
    """Print both rates and their ratios; the best of a few short repeats, since other work only ever slows one down."""
    with tempfile.TemporaryDirectory() as folder:
        rates = {kind: [asyncio.run(measure(kind, Path(folder))) for _ in range(REPEATS)] for kind in ("proxy", "gateway")}
    best = {kind: Rate(max(r.calls_per_second for r in some), min(r.cpu_us_per_call for r in some)) for kind, some in rates.items()}
    for kind, rate in best.items():
        print(f"{kind:8} {rate.calls_per_second:7.0f} calls/s   {rate.cpu_us_per_call:6.0f} us of processor time per call")
    ours, bare = best["gateway"], best["proxy"]
    print(f"durable recording over bare pass-through: {ours.calls_per_second / bare.calls_per_second:.2f}x the calls/s, ", end="")
    print(f"{ours.cpu_us_per_call / bare.cpu_us_per_call:.2f}x the processor time")


async def measure(kind: str, folder: Path) -> Rate:
    """Load one server for a while."""
    if kind == "gateway":
        async with serving("gateway", str(folder)) as (url, process):
            return await load(url, process)
    async with serving("upstream") as (upstream, _), serving("proxy", upstream) as (url, process):
        return await load(url, process)


@asynccontextmanager
async def serving(*arguments: str) -> AsyncGenerator[tuple[str, psutil.Process], None]:
    """One of the servers below in a process of its own, with the address that it prints."""
    command = [sys.executable, "-m", "bench.gateway", *arguments]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        yield (await asyncio.wait_for(server.stdout.readline(), 60)).decode().strip(), psutil.Process(server.pid)
    finally:
        server.kill()
        await server.wait()


async def load(url: str, process: psutil.Process) -> Rate:
    """Callers in a closed loop, each with a conversation that grows for some turns and begins again."""
    done = 0
    tokens = Tokens(SECRET)

    async def caller(place: int, http: aiohttp.ClientSession, end: float) -> None:
        nonlocal done
        headers, talk = {"authorization": f"Bearer {tokens.model(make_rollout('train-0', 't', place).id)}"}, [SYSTEM, QUESTION]
        while time.perf_counter() < end:
            body = orjson.dumps({"model": "any", "messages": talk})
            async with http.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                answer = orjson.loads(await response.read())
            talk = [*talk, answer["choices"][0]["message"], QUESTION] if len(talk) < 2 * TURNS else [SYSTEM, QUESTION]
            done += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await caller(0, http, time.perf_counter() + 0.3)  # warm up
        done, before, start = 0, process.cpu_times(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for place in range(CALLERS):
                group.create_task(caller(place, http, start + SECONDS))
        seconds, after = time.perf_counter() - start, process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return Rate(done / seconds, used / done * 1e6)


async def serve_gateway(folder: str) -> None:
    """Our gateway on a SQLite pool of its own."""
    model = write_tokenizer(Path(folder) / "model", corpus=[SYSTEM["content"] + QUESTION["content"] + SAID], vocab_size=600)
    renderer, store = Renderer.load(model), Path(tempfile.mkdtemp(dir=folder))
    pool = POOLS.load("sqlite")(store)
    await pool.open_group(Task(id="t", prompt=(QUESTION,)), [make_rollout("train-0", "t", i) for i in range(CALLERS)], seq=0)
    engine = ReadyEngine([], renderer.tokenizer)
    engine.answer(renderer.tokenizer.encode(SAID * 50)[:199] + list(renderer.stop_ids[:1]))
    async with Gateway(engine, renderer, pool, secret=SECRET, sampling={"train": Sampling(max_tokens=1024)}) as gateway:
        await say_and_wait(gateway.base_url)


async def serve_proxy(upstream: str) -> None:
    """Bytes in, bytes out."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def forward(request: Request) -> Response:
            body = await request.body()
            async with http.post(f"{upstream}/chat/completions", data=body, headers={"content-type": "application/json"}) as answer:
                return Response(await answer.read(), media_type="application/json")

        await serve(Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])]))


async def serve_upstream() -> None:
    """The same answer to every call."""
    message = {"role": "assistant", "content": SAID * 10}
    usage = {"prompt_tokens": 540, "completion_tokens": 200, "total_tokens": 740}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    body = orjson.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage})

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(body, media_type="application/json")

    await serve(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]))


async def serve(app: Starlette) -> None:
    """Serve as the gateway does."""
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off", ws="none")
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


if __name__ == "__main__":
    servers = {"gateway": serve_gateway, "proxy": serve_proxy, "upstream": serve_upstream}
    asyncio.run(servers[sys.argv[1]](*sys.argv[2:]))
