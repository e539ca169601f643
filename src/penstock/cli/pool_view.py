"""What `penstock pool` prints: tables of counts and groups, one rollout in full, and what is damaged."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from textwrap import indent, shorten
from typing import Any

import orjson

from penstock.cli.figures import counts, ranges
from penstock.cli.figures import reward as reward_text
from penstock.pool.base import PoolStats
from penstock.pool.check import Checked
from penstock.pool.location import PoolLocation
from penstock.records import Attempt, Group, Message, Step, Task
from penstock.rollout.transcripts import transcripts

SHOWN = 20
"""Findings that are named where a person reads; JSON has them all."""


def stats_object(place: PoolLocation, channels: dict[str, PoolStats], size_bytes: int | None) -> dict[str, Any]:
    """Counts of each channel, and the size of all."""
    steps = sum(stats.steps for stats in channels.values())
    return {
        "run": str(place.folder),
        "pool": place.name,
        "bytes": size_bytes,
        "bytes_per_step": size_bytes / steps if size_bytes and steps else None,
        "channels": {name: {**asdict(stats), "groups_by_state": _states(stats)} for name, stats in channels.items()},
    }


def stats_text(told: dict[str, Any]) -> str:
    """A block for each channel."""
    lines = [""]
    for name, stats in told["channels"].items():
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
    if not told["channels"]:
        lines += ["No group has been opened yet.", ""]
    each = f", {told['bytes_per_step']:,.0f} bytes per step" if told["bytes_per_step"] else ""
    return "\n".join([*lines, f"On disk ({told['pool']}): {size(told['bytes'])}{each}"])


def _states(stats: PoolStats) -> dict[str, int]:
    """Groups by where they stand: each in one of these."""
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
    """A table of groups."""
    if not groups:
        return "No group here; see `penstock pool stats` for the channels and numbers that there are."
    head = ("GROUP", "TASK", "ROLLOUTS", "ENDS", "REWARD", "STEPS", "TOKENS")
    rows = [
        (_short(e["id"]), _short(e["task"]), str(e["rollouts"]), _ends(e), reward_text(e["reward"]), *_sizes(e))
        for e in map(_group_entry, groups)
    ]
    return "\n".join([*_table([head, *rows]), "", f"next: penstock pool show {run} {groups[-1].id}"])


def group_object(name: str, task: Task, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """A group with one entry for each rollout."""
    return {"group": name, "task": orjson.loads(_json(task)), "rollouts": [_attempt_entry(attempt) for attempt in attempts]}


def group_text(name: str, task: Task, attempts: Sequence[Attempt], run: str) -> str:
    """The task and a table of rollouts, those that were replaced included."""
    head = ("ROLLOUT", "END", "REWARD", "STEPS", "TOKENS", "MESSAGE")
    entries = [_attempt_entry(attempt) for attempt in attempts]
    rows = [
        (_short(e["id"], 60), e["end"] or "running", reward_text(e["reward"]), *_sizes(e), _short(e["message"], 60))
        for e in entries
    ]
    lines = [f"Group {name}, channel {attempts[0].rollout.channel}", *_task(task), "", *_table([head, *rows])]
    return "\n".join([*lines, "", f"next: penstock pool show {run} {attempts[-1].rollout.id}"])


def rollout_object(task: Task, attempt: Attempt) -> dict[str, Any]:
    """All of it, tokens included."""
    whole = {name: transcript._asdict() for name, transcript in transcripts(attempt).items()}
    printable = attempt.message.encode("utf-8", "replace").decode()
    return {
        "task": asdict(task),
        "attempt": {**asdict(attempt), "message": printable},
        "reward": attempt.reward,
        "transcripts": whole,
    }


def rollout_text(task: Task, attempt: Attempt) -> str:
    """End, grades, and each transcript with its messages and steps."""
    rollout = attempt.rollout
    said = f": {_printable(attempt.message)}" if attempt.message else ""
    rows = [
        ("group", f"{rollout.group_id}, place {rollout.place}, attempt {rollout.attempt}, channel {rollout.channel}"),
        ("end", f"{attempt.end or 'running'}{said}"),
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


def checked_text(run: str, checked: Checked) -> str:
    """The verdict, and what is damaged."""
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


def size(number: int | None) -> str:
    """`12.3 MB`."""
    if number is None:
        return "unknown"
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 else f"{number / 1e3:,.1f} kB"


def _group_entry(group: Group) -> dict[str, Any]:
    rewards = [attempt.reward for attempt in group.attempts if attempt.reward is not None]
    return {
        "id": group.id,
        "seq": group.seq,
        "channel": group.channel,
        "task": group.task.id,
        "rollouts": len(group.attempts),
        "ends": dict(Counter(str(attempt.end or "running") for attempt in group.attempts)),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "steps": sum(len(attempt.steps) for attempt in group.attempts),
        "tokens": sum(len(step.completion_ids) for attempt in group.attempts for step in attempt.steps),
    }


def _attempt_entry(attempt: Attempt) -> dict[str, Any]:
    return {
        "id": attempt.rollout.id,
        "place": attempt.rollout.place,
        "attempt": attempt.rollout.attempt,
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
    return f"{grade.reward:g} from {grade.source} for {about}{'' if grade.step is None else f', step {grade.step}'}"


def _mark(mark: Any) -> str:
    what = "the rollout" if mark.step is None else f"step {mark.step}"
    note = f", {mark.note}" if mark.note else ""
    return f"{what}: {'trainable' if mark.trainable else 'not trainable'}, quality {mark.quality:g}{note}"


def _message(message: Message) -> list[str]:
    """Who said it, and what, with the calls that it made."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _json(content)
    calls = [f"→ {_json(call.get('function', call))}" for call in message.get("tool_calls") or ()]
    return [f"  {message.get('role', '?')}:", *(indent(_printable(part), "    ") for part in (text, *calls) if part)]


def _steps(attempt: Attempt) -> list[str]:
    """One line for each call."""
    nodes = {node.id: node for node in attempt.nodes}
    head = ("STEP", "TRANSCRIPT", "NEW PROMPT", "SAMPLED", "VERSION", "FINISH", "SECONDS", "BREAK")
    rows = [
        (
            str(step.index),
            _short(step.transcript),
            f"{len(nodes[step.node].token_ids):,}",
            f"{len(step.completion_ids):,}",
            _versions(step),
            step.finish,
            f"{step.seconds:.2f}",
            nodes[step.node].reason or "",
        )
        for step in attempt.steps
    ]
    return _table([head, *rows]) if rows else ["No step was recorded."]


def _versions(step: Step) -> str:
    return ranges(set(step.versions)) or "-"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _short(text: str, width: int = 40) -> str:
    return shorten(_printable(text), width, placeholder="…") if len(text) > width else _printable(text)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
