"""The gateway against a proxy that only passes bytes on: what durable, token-exact recording costs over doing nothing.

Both answer the same calls over loopback to the same load generator. The gateway renders, matches, records every step in SQLite with
an fsync before the last byte, and answers from an engine in its own process that samples 200 tokens; the proxy (Starlette, uvicorn,
aiohttp) forwards the call to a server that sends a ready-made answer of that size, whose own processor time is not counted. Each
ratio is the median over repetitions in which the two are measured one after the other.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import orjson
import psutil

from bench.gateway.load import Cell, Result, callers, go_on, load
from bench.gateway.peer import against
from bench.gateway.servers import serving
from bench.gateway.turns import turns

REPETITIONS = 4
Server = tuple[str, psutil.Process]

CELLS = {
    "c32": Cell(32),
    "c1": Cell(1),
    "c256": Cell(256, seconds=1.5),
    "c32_8k": Cell(32, context=8_000, seconds=2.0),
    "c32_32k": Cell(32, context=32_000, seconds=6.0),
    "c1_8k": Cell(1, context=8_000),
    "c32_50ms": Cell(32, wait_ms=50),
    "c256_50ms": Cell(256, wait_ms=50, seconds=1.5),
    "c32_stream": Cell(32, stream=True, between_ms=5, seconds=2.0),
    "c256_stream": Cell(256, stream=True, between_ms=20, seconds=5.0),
}
QUICK = ("c32", "c1", "c256", "c32_8k", "c32_32k", "c32_50ms", "c32_stream")
CROWD = Cell(4000, wait_ms=2000, seconds=4.0)


class Pair(NamedTuple):
    """The same cell on both."""

    ours: Result
    bare: Result


def main() -> None:
    """Print a table, or one JSON object with `--json`; `--quick` leaves out the cells that say the least."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description="The gateway against a bare pass-through.")
    parser.add_argument("--quick", action="store_true", help="under five minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--litellm", metavar="PROGRAM", help="compare with this `litellm` too, from a venv with litellm[proxy]")
    options, _ = parser.parse_known_args()
    found = asyncio.run(measure(QUICK if options.quick else tuple(CELLS), litellm=options.litellm))
    if options.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode())
        return
    for name, value in found.items():
        print(f"{name:32} {value:10.3f}" if isinstance(value, float) else f"{name:32} {value:>10}")


async def measure(names: tuple[str, ...], *, litellm: str | None = None) -> dict[str, float | int]:
    """All figures, by name."""
    found: dict[str, float | int] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with servers(Path(folder)) as (ours, bare, upstream):
            for name in names:
                pairs = [await both(CELLS[name], ours, bare) for _ in range(REPETITIONS)]
                found |= {f"{name}.{key}": value for key, value in figures(pairs).items()}
                _say(f"{name}: {found[f'{name}.per_core']:.2f}x the calls per core")
            found |= await crowd(ours, upstream)
            if litellm:
                found |= await against(litellm, Path(folder), ours, upstream[0])
        found |= await asyncio.to_thread(turns, Path(folder))
    headline = {"durable_over_passthrough": found["c32.per_core"], "added_p50_ms": found["c1.added_p50_ms"]}
    return headline | {"cpu_per_event_over_passthrough": found["c32_stream.cpu_per_event"]} | found


@asynccontextmanager
async def servers(folder: Path) -> AsyncGenerator[tuple[Server, Server, Server], None]:
    """The gateway, the proxy and what is behind it."""
    async with serving("upstream") as upstream, serving("proxy", upstream[0]) as bare, serving("gateway", str(folder)) as ours:
        for server in (bare, ours):
            await load(*server, Cell(8, seconds=0.5))
        yield ours, bare, upstream


async def both(cell: Cell, ours: Server, bare: Server) -> Pair:
    """The cell on both, one after the other."""
    passed = await load(*bare, cell)
    return Pair(await load(*ours, cell), passed)


def figures(pairs: list[Pair]) -> dict[str, float | int]:
    """What the repetitions of one cell come to."""
    streams = pairs[0].ours.events > 0
    per_event = [_event_us(ours) / _event_us(bare) for ours, bare in pairs] if streams else []
    return {
        "per_core": median(bare.cpu_us / ours.cpu_us for ours, bare in pairs),
        "calls_per_s": median((ours.calls / ours.seconds) / (bare.calls / bare.seconds) for ours, bare in pairs),
        "cpu_us": median(ours.cpu_us for ours, _ in pairs),
        "passthrough_cpu_us": median(bare.cpu_us for _, bare in pairs),
        "added_p50_ms": median(ours.p50_ms - bare.p50_ms for ours, bare in pairs),
        "errors": sum(ours.errors for ours, _ in pairs),
        **({"cpu_per_event": median(per_event)} if streams else {}),
    }


async def crowd(ours: Server, upstream: Server) -> dict[str, float | int]:
    """Thousands of calls in flight at an engine that takes two seconds, against calling that engine directly.

    Memory is what the gateway grew by until the last repetition, when each caller's conversation has some eight turns.
    """
    before = ours[1].memory_info().rss
    peak = asyncio.create_task(_peak(ours[1]))
    errors, ratio = await _crowd_over_direct(ours, upstream)
    peak.cancel()
    grown = max(0, await peak - before)
    return {
        "crowd.calls": CROWD.callers,
        "crowd.errors": errors,
        "crowd.p50_over_direct": ratio,
        "crowd.kb_per_call": grown / CROWD.callers / 1024,
    }


async def _crowd_over_direct(ours: Server, upstream: Server) -> tuple[int, float]:
    """Errors through the gateway, and the median of the ratios of median latencies."""
    async with callers(upstream[0], CROWD) as directly, callers(ours[0], CROWD) as through:
        pairs = [
            Pair(bare=await go_on(directly, upstream[1], CROWD), ours=await go_on(through, ours[1], CROWD))
            for _ in range(REPETITIONS)
        ]
    _say(f"crowd: p50 over direct {' '.join(f'{pair.ours.p50_ms / pair.bare.p50_ms:.2f}' for pair in pairs)}")
    return sum(pair.ours.errors for pair in pairs), median(pair.ours.p50_ms / pair.bare.p50_ms for pair in pairs)


async def _peak(process: psutil.Process) -> int:
    most = 0
    try:
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return most


def _event_us(result: Result) -> float:
    return result.cpu_s / max(result.events, 1) * 1e6


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
