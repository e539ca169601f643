"""What the incremental JSON reader saves over orjson, which could replace it.

The same gateway answers the same calls with either reader and records every step in SQLite. Each side runs in a process of its own
and keeps its callers; in each round, both sides make a few calls one after the other. A figure is the processor time of the serving
process per call, the median over rounds; `saved` is the median share of the other's time that ours saves in a round, with its 95 %
interval. A busy machine makes calls dearer: `quiet` is what ours saves when both sides are taken at the lower quartile of their
rounds.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median, quantiles

import psutil

from bench.gateway.load import Cell, Result, callers, go_on, load
from bench.gateway.servers import serving

ROUNDS, LEAST_ROUNDS, CELL_S = 40, 10, 70.0
"""Of a cell; there are fewer where they take longer than `CELL_S`."""
Server = tuple[str, psutil.Process]
Round = dict[str, Result]


COMMANDS = {"ours": ("gateway",), "orjson": ("gateway_reading_whole",)}
"""Of `bench.gateway.servers`."""
CELLS = {
    "turns 1 to 4": Cell(32, context=50, turns=4, calls=4),
    "turns 1 to 8": Cell(32, context=50, turns=8, calls=4),
    "turns 1 to 40": Cell(32, turns=50, questions=14, calls=1),
    "turns 50 to 90": Cell(32, context=44_000, entries=101, turns=100, calls=1),
}


def main() -> None:
    """Print a table."""
    print(f"{'conversation':24} body kB {'ours us':>8} {'orjson us':>10}   saved               quiet")
    asyncio.run(compare())


async def compare() -> None:
    """Measure and print each cell."""
    async with running(COMMANDS) as servers:
        for name, cell in CELLS.items():
            rounds = await alternate(cell, servers)
            body_kb = sum(each["ours"].sent_bytes / each["ours"].calls for each in rounds) / len(rounds) / 1000
            print(f"{name:24} {body_kb:7.1f} {figures(rounds)}", flush=True)


@asynccontextmanager
async def running(commands: dict[str, tuple[str, ...]]) -> AsyncGenerator[dict[str, Server], None]:
    """Every server, warm and on a pool of its own."""
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, (kind, *arguments) in commands.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            servers[name] = await stack.enter_async_context(serving(kind, folder, *arguments))
            await load(*servers[name], Cell(8, calls=40))
        yield servers


async def alternate(cell: Cell, servers: dict[str, Server]) -> list[Round]:
    """The rounds of a cell; each begins with another server, as the machine may slow down or speed up within one."""
    names, rounds, begun = list(servers), list[Round](), time.perf_counter()
    async with AsyncExitStack() as stack:
        them = {name: await stack.enter_async_context(callers(servers[name][0], cell)) for name in names}
        while len(rounds) < ROUNDS and (len(rounds) < LEAST_ROUNDS or time.perf_counter() < begun + CELL_S):
            first = len(rounds) % len(names)
            order = names[first:] + names[:first]
            rounds.append({name: await go_on(them[name], servers[name][1], cell) for name in order})
    if errors := sum(result.errors for each in rounds for result in each.values()):
        raise SystemExit(f"{errors} calls failed, so there is nothing to compare")
    return rounds


def figures(rounds: list[Round]) -> str:
    """What the rounds of one cell come to, as the end of a line."""
    ones, twos = ([_us(each[name]) for each in rounds] for name in COMMANDS)
    saved = sorted(1 - one / two for one, two in zip(ones, twos, strict=True))
    edge = max(0, round(len(saved) / 2 - 0.98 * len(saved) ** 0.5) - 1)  # ranks that hold the median 19 times of 20
    interval = f"({saved[edge]:4.0%} to {saved[-1 - edge]:4.0%})"
    quiet = 1 - quantiles(ones, n=4)[0] / quantiles(twos, n=4)[0]
    return f"{median(ones):8.1f} {median(twos):10.1f}   {median(saved):4.0%} {interval} {quiet:7.0%}"


def _us(result: Result) -> float:
    return result.cpu_s / result.calls * 1e6


if __name__ == "__main__":
    main()
