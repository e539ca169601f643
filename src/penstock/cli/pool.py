"""`penstock pool`: look into a run's record, check it, move it, and make it smaller."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.progress import stage_progress

if TYPE_CHECKING:
    from penstock.pool.base import Pool
    from penstock.pool.check import Checked
    from penstock.pool.location import PoolLocation

app = typer.Typer(no_args_is_help=True, help="Look into a run's record, check it, move it, and make it smaller.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's or a gateway's folder, for example runs/multiply.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Channels = Annotated[list[str] | None, typer.Option("--channel", help="This channel only; may be given again.")]


@app.command()
def stats(folder: Run, as_json: AsJson = False) -> None:
    """Count groups, rollouts, steps and tokens by channel, and what they take on disk."""
    from penstock.cli.pool_view import stats_object, stats_text
    from penstock.pool.location import find_pool, open_pool_at, size_bytes

    async def read(place: "PoolLocation") -> dict[str, Any]:
        async with open_pool_at(place) as pool:
            return {name: await pool.stats(name) for name in await pool.channels()}

    place = find_pool(folder)
    told = stats_object(place, asyncio.run(read(place)), size_bytes(place))
    typer.echo(_json(told) if as_json else stats_text(told))


@app.command()
def show(
    folder: Run,
    name: Annotated[
        str | None, typer.Argument(metavar="ID", help="Of a rollout or of a group; the newest groups without one.")
    ] = None,
    channels: Channels = None,
    limit: Annotated[int, typer.Option(min=1, help="How many groups are listed.")] = 20,
    first: Annotated[int | None, typer.Option(min=0, metavar="N", help="List from this group number on.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the newest groups, or show one rollout with its messages, tools, steps and grades."""
    from penstock.cli import pool_view
    from penstock.pool.location import find_pool, open_pool_at

    async def read(place: "PoolLocation") -> tuple[dict[str, Any], str]:
        async with open_pool_at(place) as pool:
            if name is None:
                listed = await _listed(pool, channels, limit=limit, first=first)
                return pool_view.groups_object(listed), pool_view.groups_text(listed, str(folder))
            task, attempts, whole = await _found(pool, name)
            if whole is not None:
                return pool_view.rollout_object(task, whole), pool_view.rollout_text(task, whole)
            return pool_view.group_object(name, task, attempts), pool_view.group_text(name, task, attempts, str(folder))

    told, text = asyncio.run(read(find_pool(folder)))
    typer.echo(_json(told) if as_json else text)


@app.command()
def verify(folder: Run, as_json: AsJson = False) -> None:
    """Read every row with its checksum, and hold the tables against each other.

    Reads only, so it may run beside a training run. Exit code 1 where something is damaged: what is hit is named.
    """
    from penstock.cli.pool_view import checked_text
    from penstock.pool.location import check, find_pool

    place = find_pool(folder)
    with stage_progress() as progress:
        checked = check(place, lambda done, total: progress(f"verifying {folder}", done, total))
    typer.echo(_json(_checked_object(folder, checked)) if as_json else checked_text(str(folder), checked))
    raise typer.Exit(1 if checked.findings else 0)


@app.command()
def export(
    folder: Run,
    out: Annotated[Path, typer.Option(help="The file (jsonl) or folder (parquet, atif) to make; it must not be there.")],
    form: Annotated[str, typer.Option("--format", help="jsonl or parquet, which lose nothing; atif for other tools.")] = "jsonl",
    channels: Channels = None,
    as_json: AsJson = False,
) -> None:
    """Write the record to files. They appear when they are whole; memory stays small however long the run was."""
    from penstock.pool.export import EXPORTS
    from penstock.pool.export.transfer import export_pool
    from penstock.pool.location import find_pool, open_pool_at

    EXPORTS.check(form)
    place = find_pool(folder)

    async def write() -> dict[str, Any]:
        async with open_pool_at(place) as pool:
            wanted = await _known_channels(pool, channels)
            total = sum([(await pool.stats(name)).groups for name in wanted])
            with stage_progress() as progress:
                moved = await export_pool(
                    pool, out, name=form, channels=wanted, told=lambda done: progress(f"exporting {folder}", done, total)
                )
        return {"out": str(out), "format": form, "channels": wanted, **asdict(moved)}

    told = asyncio.run(write())
    del told["known"]
    typer.echo(_json(told) if as_json else f"{out}: {_amount(told)}")
    if not as_json and form != "atif":
        typer.echo(f"next: penstock pool import {out} --into FOLDER", err=True)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="What `penstock pool export` wrote as jsonl or parquet.")],
    into: Annotated[Path, typer.Option(help="The folder whose pool takes it in; made where there is none.")],
    as_json: AsJson = False,
) -> None:
    """Read an export into a pool. Doing it again, or going on after Ctrl-C, adds what is missing."""
    from penstock.errors import ConfigError
    from penstock.pool.export.transfer import import_pool, read_export
    from penstock.pool.location import PoolLocation, find_pool, open_pool_at

    read_export(path)
    if into.exists() and not into.is_dir():
        raise ConfigError(f"{into} is no folder; give another one with --into")
    known = (into / "config.json").exists() or (into / "pool.db").exists()
    place = find_pool(into) if known else PoolLocation("sqlite", into)

    async def read() -> dict[str, Any]:
        async with open_pool_at(place) as pool:
            with stage_progress() as progress:
                moved = await import_pool(path, pool, told=lambda done: progress(f"importing {path}", done, None))
        return {"into": str(into), "pool": place.name, **asdict(moved)}

    told = asyncio.run(read())
    again = f"; {told['known']:,} rollouts were there already" if told["known"] else ""
    typer.echo(_json(told) if as_json else f"{into}: {_amount(told)}{again}")
    if not as_json:
        typer.echo(f"next: penstock pool show {into}", err=True)


@app.command()
def compact(folder: Run, as_json: AsJson = False) -> None:
    """Rewrite a SQLite pool without its gaps; nothing else may have it open."""
    from penstock.cli.pool_view import size
    from penstock.pool.location import compact as rewrite
    from penstock.pool.location import find_pool

    before, after = rewrite(find_pool(folder))
    told = {"run": str(folder), "bytes_before": before, "bytes_after": after}
    typer.echo(_json(told) if as_json else f"{folder}: {size(before)} before, {size(after)} after")


async def _listed(pool: "Pool", channels: list[str] | None, *, limit: int, first: int | None) -> list[Any]:
    """Groups of each channel: the newest, or those from a number on."""
    listed: list[Any] = []
    for name in await _known_channels(pool, channels):
        start = first if first is not None else max(0, (await pool.stats(name)).last_seq + 1 - limit)
        listed += await pool.groups(name, first_seq=start, limit=limit)
    return listed


async def _known_channels(pool: "Pool", wanted: list[str] | None) -> list[str]:
    from penstock.errors import ConfigError

    known = await pool.channels()
    for name in wanted or ():
        if name not in known:
            raise ConfigError(f"no group in channel {name!r}; there is {', '.join(known) if known else 'none at all yet'}")
    return [name for name in known if not wanted or name in wanted]


async def _found(pool: "Pool", name: str) -> tuple[Any, list[Any], Any]:
    """The task, and either a group's attempts or one rollout."""
    from penstock.errors import ConfigError, PoolError

    rollouts = await pool.rollouts(name)
    if rollouts:
        return await pool.task(rollouts[0].id), [await pool.attempt(rollout.id) for rollout in rollouts], None
    try:
        attempt = await pool.attempt(name)
    except PoolError as cause:
        if "no rollout" not in str(cause):
            raise
        raise ConfigError(f"no rollout or group {name!r}; `penstock pool show RUN` lists those there are") from cause
    return await pool.task(name), [], attempt


def _checked_object(folder: Path, checked: "Checked") -> dict[str, Any]:
    return {
        "run": str(folder),
        "status": "damaged" if checked.findings else "sound",
        "groups": checked.groups,
        "rollouts": checked.rollouts,
        "steps": checked.steps,
        "findings": [finding._asdict() for finding in checked.findings],
    }


def _amount(told: dict[str, Any]) -> str:
    return f"{told['groups']:,} groups, {told['rollouts']:,} rollouts, {told['steps']:,} steps"


def _json(told: Any) -> str:
    return orjson.dumps(told).decode()
