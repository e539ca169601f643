"""What a serving process is told to do, and the socket that it serves on."""

import asyncio
import contextlib
import hmac
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import aiohttp
import orjson
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from penstock.chat.renderer import Renderer
from penstock.codec import from_json
from penstock.config import EngineSection
from penstock.engines import ENGINES
from penstock.engines.base import Engine
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.gateway.app import Gateway
from penstock.gateway.call import GatewayLimits
from penstock.http.asgi import header
from penstock.http.listen import base_url, bind
from penstock.http.server import HttpServer
from penstock.pool.memory import MemoryPool
from penstock.records import Rollout, Sampling, Task, make_rollout
from penstock.system.garbage import collect_seldom

HOST = "127.0.0.1"

DeploymentEngine = Literal["embedded", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServerSpec:
    """What a process is to serve."""

    name: str
    """What callers name the model by."""
    folder: str
    token: str
    port: int = 0
    """Where it served before; another one is taken where that is not free."""
    engine: DeploymentEngine = "embedded"


def bind_port(port: int) -> socket.socket:
    """The port of before, so that its address stays; else a free one."""
    with suppress(ConfigError):
        return bind(HOST, port)
    return bind(HOST, 0)


POLL_S = 0.5
"""Between two questions whether it is up."""
GRACE_S = 6.0
"""For it to end after it was asked to; less than the controller waits for this process."""


@asynccontextmanager
async def serve_vllm(orders: ModelServerSpec) -> AsyncGenerator[str]:
    """Serve while this lasts; yields the URL that ends in `/v1`. EngineError where vLLM ends before it serves."""
    program = shutil.which("vllm")
    if program is None:
        raise EngineError("there is no `vllm` on the controller's PATH; pip install vllm there, or deploy with engine embedded")
    with bind_port(orders.port) as sock:  # vLLM binds it again: nobody else may have it by then, or vLLM says so and ends
        port = sock.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(program, "serve", orders.folder, "--host", HOST, "--port", str(port), "--served-model-name", orders.name),
        env=os.environ | {"VLLM_API_KEY": orders.token, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        url = base_url(HOST, port)
        await _wait_until_healthy(process, f"{url.removesuffix('/v1')}/health")
        watching = asyncio.ensure_future(_exit_with(process))
        try:
            yield url
        finally:
            watching.cancel()
    finally:
        await _end(process)


async def _wait_until_healthy(process: Process, health: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while process.returncode is None:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(health) as response:
                    if response.status == 200:
                        return
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await process.wait()
    raise EngineError(f"vLLM ended with {process.returncode} before it served; its words are in the controller's deployments.log")


async def _exit_with(process: Process) -> None:
    """A server that ends takes this process with it, so that the controller starts both again."""
    await process.wait()
    os._exit(3)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()


DRAIN_S = 5.0
"""For answers under way when it is told to stop."""
ORPHAN_EXIT_S = 10.0
"""How long it may take to end once its controller is gone."""


class DeploymentApp:
    """Lets callers with the token in, each call to the gateway as a rollout of its own."""

    def __init__(self, gateway: Gateway, pool: MemoryPool, *, token: str, sampling: Sampling) -> None:
        self._gateway, self._pool, self._sampling = gateway, pool, sampling
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call; only the health needs no token."""
        if scope["path"] == "/health":
            return await self._gateway.app(scope, receive, send)
        if not self._admits(scope):
            text = "the token of this deployment is missing or wrong; `penstock model info` shows it"
            error = {"error": {"message": text, "type": "authentication_error", "code": "invalid_api_key"}}
            return await JSONResponse(error, 401)(scope, receive, send)
        rollout = make_rollout(secrets.token_hex(8), "deployment", 0, channel="deployment")
        await self._pool.open_group(Task(id="deployment", prompt=()), [rollout], seq=0)
        try:
            self._gateway.open(rollout, self._sampling)
            await self._gateway.app(self._as_rollout(scope, rollout), receive, send)
        finally:
            self._gateway.close(rollout.id)
            self._pool.forget(rollout)

    def _admits(self, scope: Scope) -> bool:
        scheme, _, bearer = header(scope["headers"], b"authorization").partition(" ")
        shown = bearer.strip() if scheme.lower() == "bearer" else header(scope["headers"], b"x-api-key")
        return hmac.compare_digest(shown.encode("utf-8", "replace"), self._token)

    def _as_rollout(self, scope: Scope, rollout: Rollout) -> Scope:
        others = [(name, value) for name, value in scope["headers"] if name not in (b"authorization", b"x-api-key")]
        token = f"Bearer {self._gateway.tokens.model(rollout.id)}"
        return {**scope, "headers": [*others, (b"authorization", token.encode())]}


@asynccontextmanager
async def serve_embedded(orders: ModelServerSpec) -> AsyncGenerator[str]:
    """Serve while this lasts; yields the URL that ends in `/v1`."""
    folder = Path(orders.folder)
    renderer = await asyncio.to_thread(Renderer.load, folder)
    engine: Engine = await asyncio.to_thread(
        ENGINES.load("embedded"),
        folder,
        name=orders.name,
        section=EngineSection(),
        seed=secrets.randbits(31),
        decode=renderer.tokenizer.decode,
    )
    limits, pool = GatewayLimits(), MemoryPool(folder)
    try:
        gateway = Gateway(engine, renderer, pool, secret=secrets.token_bytes(32), limits=limits)
        front = DeploymentApp(gateway, pool, token=orders.token, sampling=Sampling(max_tokens=engine.context_length))
        sock = bind_port(orders.port)
        async with HttpServer(front, sock, drain_s=DRAIN_S, reader_s=limits.reader_s):
            yield base_url(HOST, sock.getsockname()[1])
    finally:
        await engine.close()


async def _main(orders: ModelServerSpec, out: BinaryIO) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    threading.Thread(target=_watch_controller, args=(loop, stop), daemon=True).start()
    opening = serve_vllm(orders) if orders.engine == "vllm" else serve_embedded(orders)
    try:
        async with opening as url:
            _write_status(out, url=url, pid=os.getpid())
            await stop.wait()
    except PenstockError as error:
        _write_status(out, error=str(error))
        return 2
    return 0


def _watch_controller(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Wait until the controller is gone; then end, in good order or, where that takes too long, not."""
    while os.read(0, 1 << 10):  # not by `sys.stdin`, whose lock would be held when this process ends in good order
        pass
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stop.set)
    time.sleep(ORPHAN_EXIT_S)
    os._exit(1)


def _write_status(out: BinaryIO, **told: object) -> None:
    out.write(orjson.dumps(told) + b"\n")
    out.flush()


def main() -> int:
    """Take orders and carry them out."""
    collect_seldom()
    orders = from_json(ModelServerSpec, sys.stdin.buffer.readline())
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for our word
    with out:
        return asyncio.run(_main(orders, out))


if __name__ == "__main__":
    sys.exit(main())
