"""How the rollout side scales, and what asynchronous training gains: `python -m bench.scale [--quick] [--json]`.

`bench.scale_rollouts` says what rollouts per second are held against, `bench.scale_training` how the two modes of training differ.
Engines: one that answers at once; one that takes 200 ms for a call, however many run; and one that takes 200 ms in 64 slots, as a
server on one GPU has some number of them. Workers are those of a local Ray; `inline` is without one. A ratio over the bare loop
says what the whole rollout side costs, the agent's own client included; that over the client alone says what ours adds to it.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import orjson

from bench import scale_training
from bench.gateway.servers import serving
from bench.scale_rollouts import Cell, config_of, measure, rollout_side

SIZES = (16, 64, 256, 1024)
WORKERS = (0, 1, 2, 4)
"""0 is `inline`."""
NO_LIMIT = 4096
ENGINES = {"0 ms": ("open_quick", NO_LIMIT), "200 ms": ("open_slow", NO_LIMIT), "200 ms, 64 slots": ("open_slow", 64)}
"""What each is called, how it is opened, and its slots."""

Figures = dict[str, dict[str, list[Cell]]]
"""Cells by workers, then by engine."""


async def rollouts(workers: tuple[int, ...], sizes: tuple[int, ...], *, quick: bool) -> Figures:
    """Every number of workers with every engine, each on a pool of its own."""
    found: Figures = {}
    async with serving("upstream") as (upstream, _):
        for number in workers:
            executor, section = ("ray", {"workers": number, "concurrency": max(sizes)}) if number else ("inline", {})
            cells = found[f"{number} workers" if number else "inline"] = {}
            for engine, (opener, slots) in ENGINES.items():
                with tempfile.TemporaryDirectory() as name:
                    config = config_of(Path(name), executor=executor, engine=opener, slots=slots, **section)
                    async with rollout_side(Path(name), config) as side:
                        cells[engine] = await measure(side, upstream, sizes, quick=quick)
                show(number, engine, cells[engine])
    return found


def show(workers: int, engine: str, cells: list[Cell]) -> None:
    print(
        f"rollouts: {f'{workers} Ray workers' if workers else 'inline'}, engine of {engine}; rollouts/s, ms of processor time each"
    )
    print(
        "  at once |   ours     ms | engine's limit | bare loop (b) | client alone (c) | ours/(a) | ours/(b) | ours/(c)", flush=True
    )
    for cell in cells:
        rates = f"{cell.ours.per_s:6.0f} {cell.ours.cpu_ms:6.1f} | {cell.limit:14.0f} | {cell.bare.per_s:13.0f}"
        client = f"{cell.client.per_s:9.0f} {cell.client.cpu_ms:6.1f}"
        ratios = " | ".join(f"{cell.ours.per_s / x:8.3f}" for x in (cell.limit, cell.bare.per_s, cell.client.per_s))
        print(f"  {cell.at_once:7d} | {rates} | {client} | {ratios}", flush=True)


def worst(found: Figures) -> list[str]:
    """What the aims ask for: the least share of the bare loop at 200 ms, and how the cost of a rollout grows with their number."""
    lines: list[str] = []
    for workers, engines in found.items():
        slow = [cell for engine, cells in engines.items() if engine != "0 ms" for cell in cells]
        least = min(slow, key=lambda cell: cell.ours.per_s / cell.bare.per_s)
        costs = [cell.ours.cpu_ms for cell in engines["0 ms"]]
        lines.append(
            f"rollouts: {workers}: at least {least.ours.per_s / least.bare.per_s:.2f} of the bare loop at 200 ms (aim: 0.9), "
            f"with {least.at_once} at once; a rollout costs {costs[-1] / costs[0]:.2f} with {SIZES[-1]} at once of what it does "
            f"with {SIZES[0]}"
        )
    return lines


def as_object(found: Figures, runs: list[scale_training.Trained]) -> dict[str, Any]:
    """Everything, for a program."""
    cells = {
        workers: {
            engine: [
                {
                    "at_once": cell.at_once,
                    "per_s": cell.ours.per_s,
                    "cpu_ms": cell.ours.cpu_ms,
                    "over_limit": cell.ours.per_s / cell.limit,
                    "over_bare": cell.ours.per_s / cell.bare.per_s,
                    "over_client": cell.ours.per_s / cell.client.per_s,
                    "client_cpu_ms": cell.client.cpu_ms,
                }
                for cell in of_engine
            ]
            for engine, of_engine in engines.items()
        }
        for workers, engines in found.items()
    }
    return {"cores": os.cpu_count(), "rollouts": cells, "training": [one._asdict() for one in runs]}


def main() -> None:
    """Print the figures as they come; with `--json` one JSON object on stdout at the end."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description="Rollouts and training at scale.")
    parser.add_argument("--quick", action="store_true", help="fewer rollouts and steps: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, after the tables")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of Ray workers; 0 is inline")
    parser.add_argument("--only", choices=("rollouts", "training"), help="one half of it")
    options, _ = parser.parse_known_args()
    print(f"scale: {os.cpu_count()} processors", flush=True)
    found: Figures = {}
    runs: list[scale_training.Trained] = []
    if options.only != "training":
        found = asyncio.run(rollouts(tuple(options.workers), SIZES, quick=options.quick))
        print("\n".join(worst(found)), flush=True)
    if options.only != "rollouts":
        with tempfile.TemporaryDirectory() as folder:
            runs = scale_training.measure(Path(folder), quick=options.quick)
        print("\n".join(scale_training.said(runs)), flush=True)
    if options.json:
        print(orjson.dumps(as_object(found, runs), option=orjson.OPT_INDENT_2).decode())


if __name__ == "__main__":
    main()
