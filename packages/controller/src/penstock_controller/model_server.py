"""The process that serves one deployed model over an OpenAI-style API, with the embedded engine or with vLLM.

Usage: `python -m penstock_controller.model_server`, with a ModelServerSpec as one line of JSON on stdin. It writes one line to
stdout: its URL, or why it cannot serve. It ends when stdin is closed, so also when the controller is killed.
"""

import asyncio
import hmac
import os
import secrets
import shutil
import signal
import socket
import sys
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
from penstock.engines.checkpoint_files import find_base, is_adapter, read_adapter_config, refuse_damaged_weights
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.gateway.app import Gateway
from penstock.gateway.request import GatewayLimits
from penstock.http.asgi import header
from penstock.http.listen import base_url, bind
from penstock.http.server import HttpServer
from penstock.pool.memory import MemoryPool
from penstock.records import RolloutRef, Sampling, Task, make_rollout
from penstock.system.processes import end_process, exit_after_parent, relax_gc

HOST = "127.0.0.1"
DRAIN_S = 5.0
"""For responses in progress after SIGTERM."""
GRACE_S = 6.0
"""Between SIGTERM and SIGKILL for vLLM; less than the controller waits for this process."""
ORPHAN_EXIT_S = 10.0
"""How long this process may take to end after its controller."""
POLL_S = 0.5
"""Pause between two health checks."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank of an adapter."""
DeploymentEngine = Literal["embedded", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServerSpec:
    name: str
    """The model's name in API requests."""
    folder: str
    token: str
    port: int = 0
    """The preferred port; a free one is taken if it is in use."""
    engine: DeploymentEngine = "embedded"


def bind_port(port: int) -> socket.socket:
    """Binds `port`, else a free port."""
    with suppress(ConfigError):
        return bind(HOST, port)
    return bind(HOST, 0)


# Serving with the embedded engine.


class DeploymentApp:
    """ASGI app: checks the deployment's token, then passes each request to the gateway as a separate rollout."""

    def __init__(self, gateway: Gateway, pool: MemoryPool, *, token: str, sampling: Sampling) -> None:
        self._gateway, self._pool, self._sampling = gateway, pool, sampling
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":  # the only path without a token
            return await self._gateway.app(scope, receive, send)
        if not self._is_authorized(scope):
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
            await asyncio.shield(self._pool.forget(rollout))

    def _is_authorized(self, scope: Scope) -> bool:
        scheme, _, bearer = header(scope["headers"], b"authorization").partition(" ")
        token = bearer.strip() if scheme.lower() == "bearer" else header(scope["headers"], b"x-api-key")
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token)

    def _as_rollout(self, scope: Scope, rollout: RolloutRef) -> Scope:
        others = [(name, value) for name, value in scope["headers"] if name not in (b"authorization", b"x-api-key")]
        token = f"Bearer {self._gateway.tokens.model(rollout.id)}"
        return {**scope, "headers": [*others, (b"authorization", token.encode())]}


@asynccontextmanager
async def serve_embedded(spec: ModelServerSpec) -> AsyncGenerator[str]:
    """Serves with the embedded engine; yields the URL, which ends in `/v1`."""
    folder = Path(spec.folder)
    await asyncio.to_thread(refuse_damaged_weights, folder)
    renderer = await asyncio.to_thread(Renderer.load, folder)
    engine: Engine = await asyncio.to_thread(
        ENGINES.load("embedded"),
        folder,
        name=spec.name,
        section=EngineSection(),
        seed=secrets.randbits(31),
        decode=renderer.tokenizer.decode,
    )
    limits, pool = GatewayLimits(), MemoryPool(folder)
    try:
        gateway = Gateway(engine, renderer, pool, secret=secrets.token_bytes(32), limits=limits)
        app = DeploymentApp(gateway, pool, token=spec.token, sampling=Sampling(max_tokens=engine.context_length))
        sock = bind_port(spec.port)
        async with HttpServer(app, sock, drain_s=DRAIN_S, reader_s=limits.reader_s):
            yield base_url(HOST, sock.getsockname()[1])
    finally:
        await engine.close()


# Serving with vLLM.


@asynccontextmanager
async def serve_vllm(spec: ModelServerSpec) -> AsyncGenerator[str]:
    """Serves with vLLM; yields the URL, which ends in `/v1`. EngineError if vLLM ends before it is ready."""
    program = shutil.which("vllm")
    if program is None:
        raise EngineError("there is no `vllm` on the controller's PATH; pip install vllm there, or deploy with engine embedded")
    with bind_port(spec.port) as sock:  # closed, since vLLM binds it itself; it exits if another program took it meanwhile
        port = sock.getsockname()[1]
    model, *named = _vllm_model(spec)
    process = await asyncio.create_subprocess_exec(
        *(program, "serve", model, "--host", HOST, "--port", str(port), *named),
        env=os.environ | {"VLLM_API_KEY": spec.token, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
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
        await end_process(process, GRACE_S)


def _vllm_model(spec: ModelServerSpec) -> list[str]:
    """Returns the model's folder and the options that give it its name; for an adapter, they name it in addition to its base."""
    folder = Path(spec.folder)
    if not is_adapter(folder):
        return [spec.folder, "--served-model-name", spec.name]
    rank = next(rank for rank in VLLM_RANKS if rank >= read_adapter_config(folder).rank)
    return [str(find_base(folder)), "--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{spec.name}={folder}"]


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
    """Exits when vLLM ends, so that the controller restarts both."""
    await process.wait()
    os._exit(3)


# The process.


def main() -> int:
    relax_gc()
    spec = from_json(ModelServerSpec, sys.stdin.buffer.readline())
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the status line
    with out:
        return asyncio.run(_main(spec, out))


async def _main(spec: ModelServerSpec, out: BinaryIO) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def stop_soon() -> None:
        with suppress(RuntimeError):  # the loop is closed: it has stopped already
            loop.call_soon_threadsafe(stop.set)

    exit_after_parent(0, ORPHAN_EXIT_S, stop_soon)
    opening = serve_vllm(spec) if spec.engine == "vllm" else serve_embedded(spec)
    try:
        async with opening as url:
            _write_status(out, url=url, pid=os.getpid())
            await stop.wait()
    except PenstockError as error:
        _write_status(out, error=str(error))
        return 2
    return 0


def _write_status(out: BinaryIO, **fields: object) -> None:
    out.write(orjson.dumps(fields) + b"\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
