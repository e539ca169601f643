"""A program: a gateway that serves until it is killed, over an engine whose replies are all different."""

import asyncio
import secrets
import sys
from pathlib import Path

from killable_process import fork_on_request, write_line

from penstock.chat.renderer import Renderer
from penstock.gateway import Gateway
from penstock.gateway.request import GatewayLimits
from penstock.pool import POOLS
from penstock.records import Sampling
from penstock.testing import ScriptedEngine

SECRET = b"a secret for tests only"


async def serve(renderer: Renderer, name: str, folder: Path, url: str) -> None:
    """Serves on a free port; writes its URL as a line."""
    pool = POOLS.load(name)(folder, url=url)
    engine = ScriptedEngine(lambda prompt: f"{secrets.token_hex(8)} after {len(prompt)}", renderer.tokenizer, chunk=64)
    sampling, limits = {"": Sampling(max_tokens=1024)}, GatewayLimits(calls_per_s=1e6)
    async with Gateway(engine, renderer, pool, secret=SECRET, sampling=sampling, limits=limits) as gateway:
        write_line(gateway.base_url.removesuffix("/v1"))
        await asyncio.Event().wait()


if __name__ == "__main__":
    model, pool_name, store, pool_url = sys.argv[1:]
    POOLS.load(pool_name)
    rendering = Renderer.load(Path(model))
    fork_on_request(lambda: asyncio.run(serve(rendering, pool_name, Path(store), pool_url)))
