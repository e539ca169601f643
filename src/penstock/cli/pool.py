"""`penstock pool`: show what a run recorded, check it, export and import it, and make it smaller."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from textwrap import indent, shorten
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.output import stage_progress, table_lines
from penstock.pool.base import PoolStats
from penstock.records import Group, Message, Rollout, Step, Task
from penstock.rollout.transcripts import transcripts
from penstock.view.formatting import counts, ranges, reward_text

if TYPE_CHECKING:
    from penstock.pool.base import Pool
    from penstock.pool.check import PoolCheck
    from penstock.pool.location import PoolLocation


app = typer.Typer(no_args_is_help=True, help="Look into a run's record, check it, move it, and make it smaller.")
SHOWN = 20
"""Findings listed as text; JSON has them all."""
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's or a gateway's folder, for example runs/multiply.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Channels = Annotated[list[str] | None, typer.Option("--channel", help="This channel only; may be given again.")]


@app.command()
def stats(folder: Run, as_json: AsJson = False) -> None:
    """Count groups, rollouts, steps and tokens by channel, and what they take on disk."""
    from penstock.pool.location import find_pool, open_pool_at

    async def read(place: "PoolLocation") -> dict[str, Any]:
        async with open_pool_at(place) as pool:
            return {name: await pool.stats(name) for name in await pool.channels()}

    place = find_pool(folder)
    result = stats_object(place, asyncio.run(read(place)), place.kind.size_bytes(place.folder, place.url))
    typer.echo(_json_text(result) if as_json else stats_text(result))


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
    from penstock.pool.location import find_pool, open_pool_at

    async def read(place: "PoolLocation") -> tuple[dict[str, Any], str]:
        async with open_pool_at(place) as pool:
            if name is None:
                listed = await _list_groups(pool, channels, limit=limit, first=first)
                return groups_object(listed), groups_text(listed, str(folder))
            task, attempts, whole = await _find(pool, name)
            if whole is not None:
                return rollout_object(task, whole), rollout_text(task, whole)
            why = _why_dropped(place.folder / "events.jsonl", name)
            return group_object(name, task, attempts) | why, group_text(name, task, attempts, str(folder), **why)

    result, text = asyncio.run(read(find_pool(folder)))
    typer.echo(_json_text(result) if as_json else text)


@app.command()
def verify(folder: Run, as_json: AsJson = False) -> None:
    """Read every row with its checksum, and hold the tables against each other.

    Reads only, so it is safe while a run is training. Exits with code 1 and names what is damaged.
    """
    from penstock.pool.location import find_pool

    place = find_pool(folder)
    with stage_progress() as progress:
        checked = place.kind.verify(place.folder, place.url, lambda done, total: progress(f"verifying {folder}", done, total))
    typer.echo(_json_text(_check_object(folder, checked)) if as_json else check_text(str(folder), checked))
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
    from penstock.pool.export.histories import export_pool
    from penstock.pool.location import find_pool, open_pool_at

    EXPORTS.check(form)
    place = find_pool(folder)

    async def write() -> dict[str, Any]:
        async with open_pool_at(place) as pool:
            wanted = await _known_channels(pool, channels)
            total = sum([(await pool.stats(name)).groups for name in wanted])
            with stage_progress() as stage:
                moved = await export_pool(
                    pool, out, name=form, channels=wanted, progress=lambda done: stage(f"exporting {folder}", done, total)
                )
        return {"out": str(out), "format": form, "channels": wanted, **asdict(moved)}

    result = asyncio.run(write())
    del result["known"]
    typer.echo(_json_text(result) if as_json else f"{out}: {_totals(result)}")
    if not as_json and form != "atif":
        typer.echo(f"next: penstock pool import {out} --into FOLDER", err=True)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="What `penstock pool export` wrote as jsonl or parquet.")],
    into: Annotated[Path, typer.Option(help="The folder whose pool takes it in; made where there is none.")],
    as_json: AsJson = False,
) -> None:
    """Read an export into a pool. Doing it again, or going on after Ctrl-C, adds what is missing."""
    from penstock.config import PoolSection
    from penstock.errors import ConfigError
    from penstock.pool.export.histories import import_pool, read_export
    from penstock.pool.location import PoolLocation, find_pool, open_pool_at

    read_export(path)
    if into.exists() and not into.is_dir():
        raise ConfigError(f"{into} is no folder; give another one with --into")
    default = PoolLocation(PoolSection().name, into)
    is_new = not (into / "config.json").exists() and default.kind.why_unreadable(into)
    place = default if is_new else find_pool(into)

    async def read() -> dict[str, Any]:
        async with open_pool_at(place) as pool:
            with stage_progress() as stage:
                moved = await import_pool(path, pool, progress=lambda done: stage(f"importing {path}", done, None))
        return {"into": str(into), "pool": place.name, **asdict(moved)}

    result = asyncio.run(read())
    again = f"; {result['known']:,} rollouts were there already" if result["known"] else ""
    typer.echo(_json_text(result) if as_json else f"{into}: {_totals(result)}{again}")
    if not as_json:
        typer.echo(f"next: penstock pool show {into}", err=True)


@app.command()
def compact(folder: Run, as_json: AsJson = False) -> None:
    """Rewrite a SQLite pool without its gaps; nothing else may have it open."""
    from penstock.pool.location import find_pool

    place = find_pool(folder)
    before = place.kind.size_bytes(place.folder, place.url)
    place.kind.compact(place.folder)
    after = place.kind.size_bytes(place.folder, place.url)
    result = {"run": str(folder), "bytes_before": before, "bytes_after": after}
    typer.echo(_json_text(result) if as_json else f"{folder}: {size(before)} before, {size(after)} after")


async def _known_channels(pool: "Pool", wanted: list[str] | None) -> list[str]:
    from penstock.errors import ConfigError

    known = await pool.channels()
    for name in wanted or ():
        if name not in known:
            raise ConfigError(f"no group in channel {name!r}; there is {', '.join(known) if known else 'none at all yet'}")
    return [name for name in known if not wanted or name in wanted]


async def _list_groups(pool: "Pool", channels: list[str] | None, *, limit: int, first: int | None) -> list[Any]:
    """Groups of each channel: the newest, or those from number `first` on."""
    listed: list[Any] = []
    for name in await _known_channels(pool, channels):
        start = first if first is not None else max(0, (await pool.stats(name)).last_seq + 1 - limit)
        listed += await pool.groups(name, first_seq=start, limit=limit)
    return listed


async def _find(pool: "Pool", name: str) -> tuple[Any, list[Any], Any]:
    """The task of a group and its attempts, or of a rollout and that rollout."""
    from penstock.errors import ConfigError, PoolError

    rollouts = await pool.rollout_refs(name)
    if rollouts:
        return await pool.task(rollouts[0].id), [await pool.rollout(rollout.id) for rollout in rollouts], None
    try:
        attempt = await pool.rollout(name)
    except PoolError as cause:
        if "no rollout" not in str(cause):
            raise
        raise ConfigError(f"no rollout or group {name!r}; `penstock pool show RUN` lists those there are") from cause
    return await pool.task(name), [], attempt


def _totals(result: dict[str, Any]) -> str:
    return f"{result['groups']:,} groups, {result['rollouts']:,} rollouts, {result['steps']:,} steps"


# Results as JSON objects and as text


def stats_object(place: "PoolLocation", channels: dict[str, PoolStats], size_bytes: int | None) -> dict[str, Any]:
    """The counts of each channel and the size on disk."""
    steps = sum(stats.steps for stats in channels.values())
    return {
        "run": str(place.folder),
        "pool": place.name,
        "bytes": size_bytes,
        "bytes_per_step": size_bytes / steps if size_bytes and steps else None,
        "channels": {name: {**asdict(stats), "groups_by_state": _states(stats)} for name, stats in channels.items()},
    }


def stats_text(result: dict[str, Any]) -> str:
    lines = [""]
    for name, stats in result["channels"].items():
        rows = [
            ("groups", f"{stats['groups']:,}: {counts(stats['groups_by_state'])}"),
            ("rollouts", f"{stats['rollouts']:,}: {counts({**stats['ends'], **_running(stats)})}"),
            ("steps", f"{stats['steps']:,}"),
            ("tokens", f"{stats['tokens']:,} sampled, {stats['prompt_tokens']:,} of prompts, each prefix once"),
            ("breaks", counts(stats["breaks"]) or "none"),
            *([("dropped", counts(stats["drops"]))] if stats.get("drops") else []),
            ("versions", f"newest {stats['last_version']}"),
        ]
        lines += [f"Channel {name}", *(f"  {label:<12}{text}" for label, text in rows), ""]
    if not result["channels"]:
        lines += ["No group has been opened yet.", ""]
    each = f", {result['bytes_per_step']:,.0f} bytes per step" if result["bytes_per_step"] else ""
    return "\n".join([*lines, f"On disk ({result['pool']}): {size(result['bytes'])}{each}"])


def _states(stats: PoolStats) -> dict[str, int]:
    """Groups by state; each is in one."""
    named = {
        field.name.removeprefix("groups_"): getattr(stats, field.name)
        for field in fields(stats)
        if field.name.startswith("groups_")
    }
    complete = named.pop("complete")
    ready = complete - sum(named.values())
    return {name: number for name, number in {"open": stats.groups - complete, "ready": ready, **named}.items() if number}


def _running(stats: dict[str, Any]) -> dict[str, int]:
    running = stats["rollouts"] - sum(stats["ends"].values())
    return {"running": running} if running else {}


def groups_object(groups: Sequence[Group]) -> dict[str, Any]:
    """One entry for each group, without its tokens."""
    return {"groups": [_group_entry(group) for group in groups]}


def groups_text(groups: Sequence[Group], run: str) -> str:
    if not groups:
        return "No group here; see `penstock pool stats` for the channels and numbers that there are."
    head = ("GROUP", "TASK", "ROLLOUTS", "ENDS", "REWARD", "STEPS", "TOKENS")
    rows = [
        (_short(e["id"]), _short(e["task"]), str(e["rollouts"]), _ends(e), reward_text(e["reward"]), *_sizes(e))
        for e in map(_group_entry, groups)
    ]
    return "\n".join([*table_lines([head, *rows]), "", f"next: penstock pool show {run} {groups[-1].id}"])


def group_object(name: str, task: Task, attempts: Sequence[Rollout]) -> dict[str, Any]:
    """A group with one entry for each rollout."""
    return {"group": name, "task": orjson.loads(_json_text(task)), "rollouts": [_attempt_entry(attempt) for attempt in attempts]}


def _why_dropped(events: Path, group_id: str) -> dict[str, str]:
    """Returns why a group is not trained, as the run recorded it; empty if it is."""
    found: dict[str, Any] = {}
    with suppress(FileNotFoundError), events.open("rb") as lines:
        for line in lines:
            if b'"group.drop"' in line and line.endswith(b"\n"):  # the last line may be half written
                event = orjson.loads(line)
                found = event if event["group_id"] == group_id else found
    return {"dropped": ": ".join(found[key] for key in ("reason", "message") if key in found)} if found else {}


def group_text(name: str, task: Task, attempts: Sequence[Rollout], run: str, *, dropped: str = "") -> str:
    """The task and a table of rollouts, those that were replaced included."""
    head = ("ROLLOUT", "END", "REWARD", "STEPS", "TOKENS", "MESSAGE")
    entries = [_attempt_entry(attempt) for attempt in attempts]
    rows = [
        (_short(e["id"], 60), e["end"] or "running", reward_text(e["reward"]), *_sizes(e), _short(e["message"], 60))
        for e in entries
    ]
    why = [f"Not trained, {dropped}"] if dropped else []
    lines = [f"Group {name}, channel {attempts[0].ref.channel}", *why, *_task(task), "", *table_lines([head, *rows])]
    return "\n".join([*lines, "", f"next: penstock pool show {run} {attempts[-1].ref.id}"])


def rollout_object(task: Task, attempt: Rollout) -> dict[str, Any]:
    """Everything recorded, tokens included."""
    whole = {name: t._replace(replies=None)._asdict() for name, t in transcripts(attempt).items()}
    printable = attempt.message.encode("utf-8", "replace").decode()
    fields = {name: value for name, value in asdict(attempt).items() if name != "ref"}
    return {
        "task": asdict(task),
        "attempt": {"rollout": asdict(attempt.ref), **fields, "message": printable},
        "reward": attempt.reward,
        "transcripts": whole,
    }


def rollout_text(task: Task, attempt: Rollout) -> str:
    """End, grades, and each transcript with its messages and steps."""
    rollout = attempt.ref
    message = f": {_printable(attempt.message)}" if attempt.message else ""
    rows = [
        ("group", f"{rollout.group_id}, place {rollout.place}, attempt {rollout.attempt}, channel {rollout.channel}"),
        *([("branch", f"of {rollout.branch.rollout_id}, from its step {rollout.branch.step} on")] if rollout.branch else []),
        ("end", f"{attempt.end or 'running'}{message}"),
        ("reward", reward_text(attempt.reward)),
        *(("grade", _grade(grade)) for grade in attempt.grades),
        *(("mark", _mark(mark)) for mark in attempt.marks),
    ]
    lines = [f"Rollout {rollout.id}", *(f"  {label:<10}{text}" for label, text in rows), *_task(task)]
    for name, transcript in transcripts(attempt).items():
        tools = [tool.get("function", tool).get("name", "?") for tool in transcript.tools]
        lines += ["", f"Transcript {name}" + (f", tools {', '.join(map(str, tools))}" if tools else "")]
        lines += [part for message in transcript.messages for part in _message(message)]
    return "\n".join([*lines, "", *_steps(attempt)])


def _check_object(folder: Path, checked: "PoolCheck") -> dict[str, Any]:
    return {
        "run": str(folder),
        "status": "damaged" if checked.findings else "sound",
        "groups": checked.groups,
        "rollouts": checked.rollouts,
        "steps": checked.steps,
        "findings": [finding._asdict() for finding in checked.findings],
    }


def check_text(run: str, checked: "PoolCheck") -> str:
    read = f"{checked.groups:,} groups, {checked.rollouts:,} rollouts, {checked.steps:,} steps read"
    if not checked.findings:
        return f"\nThe pool of {run} is sound: {read}.\n"
    lines = [f"\nThe pool of {run} is DAMAGED: {len(checked.findings):,} findings; {read}.", ""]
    lines += [
        f"  {finding.table:<14}{_printable(finding.id) or '-':<24}{_printable(finding.what)}"
        for finding in checked.findings[:SHOWN]
    ]
    if len(checked.findings) > SHOWN:
        lines.append(f"  and {len(checked.findings) - SHOWN:,} more; --json names them all")
    return "\n".join([*lines, "", "next: restore a copy, or save what is left with `sqlite3 pool.db .recover`", ""])


def _group_entry(group: Group) -> dict[str, Any]:
    rewards = [attempt.reward for attempt in group.rollouts if attempt.reward is not None]
    return {
        "id": group.id,
        "seq": group.seq,
        "channel": group.channel,
        "task": group.task.id,
        "rollouts": len(group.rollouts),
        "ends": dict(Counter(str(attempt.end or "running") for attempt in group.rollouts)),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "steps": sum(len(attempt.steps) for attempt in group.rollouts),
        "tokens": sum(len(step.completion_ids) for attempt in group.rollouts for step in attempt.steps),
    }


def _attempt_entry(attempt: Rollout) -> dict[str, Any]:
    return {
        "id": attempt.ref.id,
        "place": attempt.ref.place,
        "attempt": attempt.ref.attempt,
        "end": attempt.end,
        "message": _printable(attempt.message),
        "reward": attempt.reward,
        "steps": len(attempt.steps),
        "tokens": sum(len(step.completion_ids) for step in attempt.steps),
    }


def _ends(entry: dict[str, Any]) -> str:
    return counts(entry["ends"])


def _sizes(entry: dict[str, Any]) -> tuple[str, str]:
    return f"{entry['steps']:,}", f"{entry['tokens']:,}"


def _task(task: Task) -> list[str]:
    label = f", label {_short(task.label)}" if task.label is not None else ""
    return [f"  task      {_short(task.id)}{label}"]


def _grade(grade: Any) -> str:
    about = grade.transcript or "the rollout"
    parts = f" ({', '.join(f'{name} {value:g}' for name, value in grade.components.items())})" if grade.components else ""
    return f"{grade.reward:g}{parts} from {grade.source} for {about}{'' if grade.step is None else f', step {grade.step}'}"


def _mark(mark: Any) -> str:
    what = "the rollout" if mark.step is None else f"step {mark.step}"
    note = f", {mark.note}" if mark.note else ""
    return f"{what}: {'trainable' if mark.trainable else 'not trainable'}, quality {mark.quality:g}{note}"


def _message(message: Message) -> list[str]:
    """The role, the content and the tool calls of a message."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _json_text(content)
    calls = [f"→ {_json_text(call.get('function', call))}" for call in message.get("tool_calls") or ()]
    return [f"  {message.get('role', '?')}:", *(indent(_printable(part), "    ") for part in (text, *calls) if part)]


def _steps(attempt: Rollout) -> list[str]:
    nodes = {node.id: node for node in attempt.nodes}
    several = any(step.policy for step in attempt.steps)
    policy = ("POLICY",) if several else ()
    head = ("STEP", *policy, "TRANSCRIPT", "NEW PROMPT", "SAMPLED", "VERSION", "FINISH", "SECONDS", "BREAK")
    rows = [
        (
            str(step.index),
            *((step.policy or "-",) if several else ()),
            _short(step.transcript),
            f"{len(nodes[step.node].token_ids):,}",
            f"{len(step.completion_ids):,}",
            _versions(step),
            "replayed" if step.replayed else step.finish,
            f"{step.seconds:.2f}",
            nodes[step.node].reason or "",
        )
        for step in attempt.steps
    ]
    return table_lines([head, *rows]) if rows else ["No step was recorded."]


def _versions(step: Step) -> str:
    return ranges(set(step.versions)) or "-"


def size(number: int | None) -> str:
    if number is None:
        return "unknown"
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 else f"{number / 1e3:,.1f} kB"


def _short(text: str, width: int = 40) -> str:
    return shorten(_printable(text), width, placeholder="…") if len(text) > width else _printable(text)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


def _json_text(value: Any) -> str:
    return orjson.dumps(value).decode()
