"""A run as one HTML file: the dashboard's page with its scripts, and the answers to what it would ask, up to a size.

`report.html` is such a file. It loads nothing and allows no other script: its policy names the digests of its scripts.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import ConfigError, PenstockError
from penstock.events import json_line
from penstock.pool.base import PoolDatabase
from penstock.run.folder import find_run_folder
from penstock.system.files import write_file
from penstock.view import overview, rollouts
from penstock.view.app import FILES, reading
from penstock.view.queries import ended_page, group_page, group_rows
from penstock.view.run_files import ViewedRun, open_viewed_run

MODULES = ("dom", "api", "charts", "runs", "rollouts", "tokens", "system", "evals", "main")
"""In the order of their imports."""
MAX_CALLS = 8
"""Calls of a rollout whose tokens are included."""


class ExportLimits(NamedTuple):
    """How much of a run goes into a page, at most."""

    steps: int = 200
    rollouts: int = 100_000
    size: int = 6_000_000
    """Bytes of the answers: the page fits into a mail."""


MAIL = ExportLimits()
REPORT = ExportLimits(steps=40, rollouts=24, size=2_000_000)
"""Of `report.html`, which every run makes at its end, so that it takes a moment only."""
Answer = tuple[str, Callable[[], dict[str, Any]]]


def write_report(folder: Path) -> Path:
    """Writes `report.html` into the run folder and returns its path; ConfigError if it is no run folder."""
    find_run_folder(folder)
    return export_run(folder, folder / "report.html", limits=REPORT)


def export_run(folder: Path, file: Path, *, limits: ExportLimits = MAIL) -> Path:
    """Writes the run in `folder` as one page. Runs that do not fit are cut; the page reports where it has no answer."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a run folder such as runs/multiply")
    files = open_viewed_run(folder)
    files.refresh()
    name = folder.resolve().name
    if files.why_no_pool():
        answers = _answers(_queries(files, name, None, limits), limits)
    else:
        with reading(files) as database:
            answers = _answers(_queries(files, name, database, limits), limits)
    try:
        return write_file(file, _page(name, answers))
    except OSError as cause:
        raise ConfigError(f"{file}: cannot be written: {cause.strerror}; make its folder writable, or choose another") from cause


def _answers(queries: Iterable[Answer], limits: ExportLimits) -> dict[str, bytes]:
    """Returns the answers by the address that the page would ask, the most telling first."""
    found, size = dict[str, bytes](), 0
    for address, query in queries:
        if address in found:
            continue
        try:
            answer = json_line(query())
        except PenstockError:  # a damaged rollout is left out, as the page of a run without it
            continue
        size += len(answer)
        if size > limits.size:
            break
        found[address] = answer
    return found


def _queries(files: ViewedRun, run: str, database: PoolDatabase | None, limits: ExportLimits) -> Iterator[Answer]:
    yield f"run?run={run}", lambda: overview.run_overview(files, run, database)
    yield f"metrics?run={run}", lambda: overview.metrics_columns(files)
    if database is None:
        return
    steps, left = files.metrics.steps[-limits.steps :], limits.rollouts
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
    names = [group for step in _spread(steps) for group in _group_ids(files, step)]
    if not steps:  # an evaluation, or a recording
        names = [row.id for channel in channels for row in group_page(database, channel, before=overview.AFTER_LAST)]
    for group in names:
        if left <= 0:
            return
        yield f"group?run={run}&group={group}", lambda group=group: rollouts.group_screen(files, database, group)
        for row in group_rows(database, [group]):
            for attempt in row.attempts[:left]:
                yield from _rollout(files, run, database, attempt.ref.id)
            left -= len(row.attempts)


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


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · penstock</title>
<style>{style}</style>
</head>
<body>
<p>This page shows the run {title} with scripts, which are switched off here.</p>
"""


def _page(run: str, answers: dict[str, bytes]) -> bytes:
    pairs = [json_line({address: 0})[1:-4] + b":" + answer.strip() for address, answer in answers.items()]
    data = (b"{" + b",".join(pairs) + b"}").replace(b"<", b"\\u003c")
    scripts = {"text/javascript": FILES["uplot.js"].decode(), "module": bundle()}
    style = FILES["uplot.css"].decode() + FILES["view.css"].decode()
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts.values())
    sources = f"script-src {allowed}; img-src data:; style-src 'sha256-{_digest(style)}'"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    head = PAGE.format(policy=policy, title=escape(run), style=style)
    opening = f'<script type="application/json" id="data" data-run="{escape(run)}">'
    made = "".join(f'<script type="{kind}">{script}</script>\n' for kind, script in scripts.items())
    return (head + opening).encode("utf-8", "replace") + data + f"</script>\n{made}</body>\n</html>\n".encode("utf-8", "replace")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
