"""A run as one HTML file: the dashboard's page with its scripts, and the answers to what it would ask, up to a size.

The file asks for nothing and allows no other script: its policy names the digests of its own.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock.events import json_line
from penstock.pool.sql.database import PoolDatabase
from penstock.system.files import write_file
from penstock.view import overview, rollouts
from penstock.view.app import FILES, reading
from penstock.view.queries import ended_page, group_rows
from penstock.view.run_files import ViewedRun, open_viewed_run

MODULES = ("dom", "api", "charts", "runs", "rollouts", "tokens", "system", "evals", "main")
"""In the order of their imports."""
MAX_BYTES = 6_000_000
"""Of the answers: the page fits into a mail."""
MAX_STEPS = 200
MAX_CALLS = 8
"""Calls of a rollout whose tokens are included."""
Answer = tuple[str, Callable[[], dict[str, Any]]]


def export_run(folder: Path, file: Path) -> Path:
    """Writes the run in `folder` as one page. Runs that do not fit are cut; the page says so where it has no answer."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run folder such as runs/multiply")
    files = open_viewed_run(folder)
    files.refresh()
    name = folder.resolve().name
    if files.why_no_pool():
        answers = _answers(files, name, None)
    else:
        with reading(files) as database:
            answers = _answers(files, name, database)
    try:
        return write_file(file, _page(name, answers))
    except OSError as cause:
        raise ConfigError(f"{file}: cannot be written: {cause.strerror}; choose another file") from cause


def _answers(files: ViewedRun, run: str, database: PoolDatabase | None) -> dict[str, bytes]:
    """Returns the answers by the address that the page would ask, the most telling first."""
    found, size = dict[str, bytes](), 0
    for address, query in _queries(files, run, database):
        if address in found:
            continue
        try:
            answer = json_line(query())
        except PenstockError:  # a damaged rollout is left out, as the page of a run without it
            continue
        size += len(answer)
        if size > MAX_BYTES:
            break
        found[address] = answer
    return found


def _queries(files: ViewedRun, run: str, database: PoolDatabase | None) -> Iterator[Answer]:
    yield f"run?run={run}", lambda: overview.run_overview(files, run, database)
    yield f"metrics?run={run}", lambda: overview.metrics_columns(files)
    if database is None:
        return
    steps = files.metrics.steps[-MAX_STEPS:]
    for step in steps:
        yield f"step?run={run}&step={step}", lambda step=step: _step(files, database, step)
    channels = overview.channel_names(database)
    for channel in channels:
        yield (
            f"groups?run={run}&channel={channel}",
            lambda channel=channel: overview.group_list(files, database, channel=channel, state="", before=overview.AFTER_LAST),
        )
    failed = [(channel, end) for channel in channels for end in overview.failed_ends(database, channel)]
    for channel, end in failed:
        page = ended_page(database, channel, end, before=overview.AFTER_LAST)
        ended = {"rollouts": [each._asdict() for each in page.found], "before": None}
        yield f"ended?run={run}&end={end}&channel={channel}", lambda ended=ended: ended
        for each in page.found[:3]:
            yield from _rollout(files, run, database, each.id)
    for step in _spread(steps):
        for group in _group_ids(files, step):
            yield f"group?run={run}&group={group}", lambda group=group: rollouts.group_screen(files, database, group)
            for row in group_rows(database, [group]):
                for attempt in row.attempts:
                    yield from _rollout(files, run, database, attempt.rollout.id)


def _step(files: ViewedRun, database: PoolDatabase, step: int) -> dict[str, Any]:
    return overview.step_groups(files, group_rows(database, _group_ids(files, step)), step)


def _group_ids(files: ViewedRun, step: int) -> list[str]:
    names: list[str] = (files.metrics.entry(step) or {}).get("group_ids") or []
    return names[:500]


def _spread(steps: list[int]) -> list[int]:
    """Returns the last step, the first, the one in the middle, and so on, so that a page that is cut has all times."""
    order, left = list[int](), list(steps)
    while left:
        order += [left.pop()] + ([left.pop(0)] if left else []) + ([left.pop(len(left) // 2)] if left else [])
    return order


def _rollout(files: ViewedRun, run: str, database: PoolDatabase, name: str) -> Iterator[Answer]:
    shown = rollouts.rollout_screen(files, database, name)
    yield f"rollout?run={run}&rollout={name}", lambda: shown
    for call in shown["calls"][:MAX_CALLS]:
        index = call["index"]
        address = f"run={run}&rollout={name}&call={index}"
        yield f"tokens?{address}", lambda index=index: rollouts.tokens_screen(files, database, name, index)


def bundle() -> str:
    """Returns all modules as one script: each becomes a function that returns what it exports."""
    parts = [_module(name, FILES[f"{name}.js"].decode()) for name in MODULES]
    return "\n".join(parts)


def _module(name: str, source: str) -> str:
    names = re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", source, re.MULTILINE)
    inside = re.sub(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', r"const \1 = module_\2;", source, flags=re.MULTILINE)
    inside = re.sub(r"^export ", "", inside, flags=re.MULTILINE)
    return f"const module_{name} = (() => {{\n{inside}\nreturn {{ {', '.join(names)} }};\n}})();"


def _page(run: str, answers: dict[str, bytes]) -> bytes:
    pairs = [json_line({address: 0})[1:-4] + b":" + answer.strip() for address, answer in answers.items()]
    data = (b"{" + b",".join(pairs) + b"}").replace(b"<", b"\\u003c")
    scripts = [FILES["uplot.js"].decode(), bundle()]
    style = FILES["uplot.css"].decode() + FILES["view.css"].decode()
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_digest(style)}'; img-src data:; base-uri 'none'"
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header id="top"></header>
<main id="main" tabindex="-1"><p class="dim">Loading…</p></main>
<script type="application/json" id="data" data-run="{escape(run)}">"""
    tail = "".join(
        f'<script type="{kind}">{script}</script>\n' for kind, script in zip(("text/javascript", "module"), scripts, strict=True)
    )
    return head.encode("utf-8", "replace") + data + b"</script>\n" + tail.encode() + b"</body>\n</html>\n"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
