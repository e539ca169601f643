"""A gateway that serves until it is killed, with an engine that never says the same thing twice."""

import asyncio
import secrets
import sys
from pathlib import Path

from nursery import raise_children, say

from penstock.chat.renderer import Renderer
from penstock.gateway import Gateway
from penstock.gateway.calls import Limits
from penstock.gateway.peers import Peers
from penstock.pool import POOLS
from penstock.records import Sampling
from penstock.testing import ScriptedEngine

SECRET = b"a secret for tests only"


async def serve(renderer: Renderer, name: str, folder: Path, url: str, number: int, of: int) -> None:
    """Worker `number` of `of`, each with a port of its own, which it tells."""
    pool = POOLS.load(name)(folder, url=url)
    engine = ScriptedEngine(lambda prompt: f"{secrets.token_hex(8)} after {len(prompt)}", renderer.tokenizer, chunk=64)
    sampling, limits, peers = {"": Sampling(max_tokens=1024)}, Limits(calls_per_s=1e6), Peers(number, of, folder)
    async with Gateway(engine, renderer, pool, secret=SECRET, sampling=sampling, limits=limits, peers=peers) as gateway:
        say(gateway.base_url.removesuffix("/v1"))
        await asyncio.Event().wait()


if __name__ == "__main__":
    model, pool_name, store, pool_url, which, all_of_them = sys.argv[1:]
    POOLS.load(pool_name)
    rendering = Renderer.load(Path(model))
    raise_children(lambda: asyncio.run(serve(rendering, pool_name, Path(store), pool_url, int(which), int(all_of_them))))
