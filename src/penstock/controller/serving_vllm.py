"""A model served by a vLLM server of its own: `vllm serve` on a port of this machine, with the deployment's token for its key."""

import asyncio
import os
import shutil
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import aiohttp

from penstock.controller.serving_orders import HOST, Orders, bound
from penstock.errors import EngineError
from penstock.http.listen import base_url

ASK_S = 0.5
"""Between two questions whether it is up."""
GRACE_S = 6.0
"""For it to end after it was asked to; less than the controller waits for this process."""


@asynccontextmanager
async def served(orders: Orders) -> AsyncGenerator[str]:
    """Serve while this lasts; yields the URL that ends in `/v1`. EngineError where vLLM ends before it serves."""
    program = shutil.which("vllm")
    if program is None:
        raise EngineError("there is no `vllm` on the controller's PATH; pip install vllm there, or deploy with engine embedded")
    with bound(orders.port) as sock:  # vLLM binds it again: nobody else may have it by then, or vLLM says so and ends
        port = sock.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(program, "serve", orders.folder, "--host", HOST, "--port", str(port), "--served-model-name", orders.name),
        env=os.environ | {"VLLM_API_KEY": orders.token, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        url = base_url(HOST, port)
        await _until_up(process, f"{url.removesuffix('/v1')}/health")
        watching = asyncio.ensure_future(_end_with(process))
        try:
            yield url
        finally:
            watching.cancel()
    finally:
        await _end(process)


async def _until_up(process: Process, health: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while process.returncode is None:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(health) as response:
                    if response.status == 200:
                        return
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await process.wait()
    raise EngineError(f"vLLM ended with {process.returncode} before it served; its words are in the controller's deployments.log")


async def _end_with(process: Process) -> None:
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
