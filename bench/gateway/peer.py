"""The LiteLLM proxy on the same calls; opt-in, since it is a large install: `pip install 'litellm[proxy]'` in a venv of its own.

The work is not equal: it records nothing and keeps no tokens. It forwards to the same server as the bare pass-through.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median

import psutil

from bench.gateway.load import Cell, Connection, load

KEY = "sk-a-throwaway-key-for-benchmarks"
STARTS_WITHIN_S = 120


@asynccontextmanager
async def litellm(program: str, folder: Path, upstream: str) -> AsyncGenerator[tuple[str, psutil.Process], None]:
    """The proxy with its default settings in front of `upstream`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: any\n    litellm_params: {model: openai/any, api_base: "
        f'"{upstream}", api_key: none}}\ngeneral_settings: {{master_key: {KEY}}}\n'
    )
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "LITELLM_TELEMETRY": "False"}
    command = [program, "--config", str(config), "--port", str(port), "--host", "127.0.0.1", "--telemetry", "False"]
    quiet = asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(*command, env=environment, stdout=quiet, stderr=quiet)
    try:
        await _listens(port)
        yield f"http://127.0.0.1:{port}/v1", psutil.Process(server.pid)
    finally:
        server.kill()
        await server.wait()


async def against(program: str, folder: Path, ours: tuple[str, psutil.Process], upstream: str) -> dict[str, float | int]:
    """Calls per core of ours over the peer's, in turns."""
    cell, ratios, errors = Cell(32, seconds=2.0), list[float](), 0
    async with litellm(program, folder, upstream) as (url, process):
        await load(url, process, Cell(4, seconds=2.0), token=KEY)
        for _ in range(4):
            theirs = await load(url, process, cell, token=KEY)
            mine = await load(*ours, cell)
            ratios.append(theirs.cpu_us / mine.cpu_us)
            errors += theirs.errors
    return {"litellm.per_core": median(ratios), "litellm.errors": errors}


async def _listens(port: int) -> None:
    async with asyncio.timeout(STARTS_WITHIN_S):
        while True:
            with suppress(OSError):
                (await Connection.open(f"http://127.0.0.1:{port}")).close()
                return
            await asyncio.sleep(0.2)
