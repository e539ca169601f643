"""How long the dashboard's screens take as a run grows: each screen's first and second answer, and the server's memory.

`python -m bench.view [--rollouts 100000] [--calls 10] [--json]`; a run of that size is compared with one of a hundredth of it.
With `--browser`, a real Chromium opens each screen, in a server of its own that was just started: until the screen is drawn.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp

from penstock.config import RunConfig
from penstock.pool.rows import encode_row, grade_key
from penstock.pool.sqlite import migrate, open_database
from penstock.records import Grade, Node, Sampling, Step, Task, make_rollout
from penstock.run.folder import RunFolder, open_run_folder
from penstock.view.app import serve_view
from penstock.view.sources import FolderSource

GROUP_SIZE, GROUPS_PER_STEP, TOKENS = 8, 8, 40
LIMIT_S = 2.0


def make_run(root: Path, rollouts: int, calls: int) -> RunFolder:
    """A finished run, its rows written straight into the tables: the pool's own writes would take an hour."""
    (root / "tasks.jsonl").write_text('{"prompt": "x"}\n')
    tree = {"run": {"name": "run", "folder": str(root)}, "dataset": {"train": str(root / "tasks.jsonl")}}
    folder = open_run_folder(RunConfig.model_validate(tree), fresh=False)
    groups = rollouts // GROUP_SIZE
    with closing(open_database(folder.path / "pool.db")) as database:
        migrate(database)
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        for seq in range(groups):
            _add_group(database, seq, calls)
        counts = [("state", "trained", groups), ("end", "completed", rollouts), ("top", "seq", groups - 1)]
        counts += [("count", "rollouts", rollouts), ("count", "steps", rollouts * calls)]
        for kind, name, n in counts:
            database.execute("INSERT INTO tally (channel, kind, name, n) VALUES ('train', ?, ?, ?)", (kind, name, n))
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    _add_files(folder, groups)
    return folder


def _add_group(database: Any, seq: int, calls: int) -> None:
    name, task = f"train-{seq}", Task(id=f"task-{seq}", prompt=({"role": "user", "content": f"question {seq}"},))
    row = encode_row(task, "a task")
    group = "INSERT INTO groups (id, channel, seq, state, record, crc) VALUES (?, 'train', ?, 'trained', ?, ?)"
    database.execute(group, (name, seq, row.record, row.crc))
    version = seq // GROUPS_PER_STEP + 1
    database.execute("INSERT INTO ledger (group_id, lease_id, version) VALUES (?, 'lease', ?)", (name, version))
    for place in range(GROUP_SIZE):
        rollout = make_rollout(name, task.id, place)
        row = encode_row(rollout, "a rollout")
        columns = "id, group_id, place, channel, current, ended, message, record, crc"
        query = f"INSERT INTO rollouts ({columns}) VALUES (?, ?, ?, 'train', 1, 'completed', x'', ?, ?)"
        database.execute(query, (rollout.id, name, place, row.record, row.crc))
        for index in range(calls):
            _add_call(database, rollout.id, index, version - 1)
        grade = Grade(rollout_id=rollout.id, reward=float(place % 2), source="grader")
        row = encode_row(grade, "a grade")
        database.execute(
            "INSERT INTO grades (rollout_id, id, record, crc) VALUES (?, ?, ?, ?)",
            (rollout.id, grade_key(grade), row.record, row.crc),
        )


def _add_call(database: Any, rollout_id: str, index: int, version: int) -> None:
    parent = index - 1 if index else None
    message = {"role": "user", "content": f"result {index}"}
    node = Node(
        rollout_id=rollout_id, id=index, parent=parent, token_ids=tuple(range(20)), messages_digest="c", messages=(message,)
    )
    ids = tuple(range(index, index + TOKENS))
    step = Step(
        rollout_id=rollout_id,
        index=index,
        node=index,
        transcript="main",
        completion_ids=ids,
        logprobs=(-0.5,) * TOKENS,
        versions=(version,) * TOKENS,
        sampling=Sampling(),
        finish="stop",
        message={"role": "assistant", "content": f"reply {index}"},
        messages_digest="c",
        seconds=0.1,
        created=1_790_000_000.0,
    )
    row = encode_row(node, "a node")
    nodes = "INSERT INTO nodes (rollout_id, id, record, token_ids, crc) VALUES (?, ?, ?, ?, ?)"
    database.execute(nodes, (rollout_id, index, row.record, *row.columns, row.crc))
    row = encode_row(step, "a step")
    columns = "rollout_id, id, record, completion_ids, logprobs, full_logprobs, versions, crc"
    steps = f"INSERT INTO steps ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    database.execute(steps, (rollout_id, index, row.record, *row.columns, row.crc))


def _add_files(folder: RunFolder, groups: int) -> None:
    numbers = {"reward": 0.5, "rewards": [0.0, 1.0] * 32, "groups": GROUPS_PER_STEP, "rollouts": 64, "sampled_tokens": 25_600}
    lines = list[bytes]()
    for step in range(1, groups // GROUPS_PER_STEP + 1):
        names = [f"train-{(step - 1) * GROUPS_PER_STEP + at}" for at in range(GROUPS_PER_STEP)]
        folder.add_metrics({"step": step, "steps": groups // GROUPS_PER_STEP, "version": step, "group_ids": names, **numbers})
        for name in names:
            for place in range(GROUP_SIZE):
                for kind in ("rollout.start", "rollout.end"):
                    event = {"time": 1_790_000_000.0 + step, "kind": kind, "rollout_id": f"{name}.{place}.1", "end": "completed"}
                    lines.append(json.dumps(event, separators=(",", ":")).encode() + b"\n")
    folder.events.write_bytes(b"".join(lines))
    folder.write_summary(b'{"status": "finished"}')


def rss_mb(pid: int | str = "self") -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


async def measure(folder: Path, groups: int) -> dict[str, list[float]]:
    """Seconds of every screen: its first answer, and the middle one of five more."""
    middle = f"train-{groups // 2}"
    asked = {
        "runs": "runs",
        "run": "run",
        "metrics": "metrics",
        "step": "step?step=5",
        "groups": "groups",
        "group": f"group?group={middle}",
        "rollout": f"rollout?rollout={middle}.0.1",
        "tokens": f"tokens?rollout={middle}.0.1&call=5",
        "timeline": "timeline",
        "pool": "pool",
        "rare end": "ended?end=timeout",
    }
    found = dict[str, list[float]]()
    async with serve_view(FolderSource(folder), host="127.0.0.1", port=0) as url, aiohttp.ClientSession() as session:
        for name, query in asked.items():
            times = list[float]()
            for _ in range(6):
                start = time.perf_counter()
                async with session.get(f"{url}api/{query}{'&' if '?' in query else '?'}run=run") as answer:
                    body = await answer.read()
                    assert answer.status == 200, body[:500]
                times.append(time.perf_counter() - start)
            found[name] = [times[0], sorted(times[1:])[2]]
    return found


SCREENS = {
    "runs": "#/runs",
    "run": "#/run/run",
    "step": "#/run/run/step/5",
    "groups": "#/run/run/groups",
    "ended": "#/run/run/ended/timeout",
    "search": "#/run/run/search?text=no%20such%20words",
    "group": "#/run/run/group/{middle}",
    "rollout": "#/run/run/rollout/{middle}.0.1",
    "tokens": "#/run/run/tokens/{middle}.0.1/5",
    "timeline": "#/run/run/timeline",
    "pool": "#/run/run/pool",
    "evaluations": "#/evals",
}


def paint(folder: Path, groups: int) -> tuple[dict[str, list[float]], float]:
    """Seconds from the address to the drawn screen in a fresh tab, at first and again; and what the server grew by."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    found = dict[str, list[float]]()
    command = [sys.executable, "-m", "penstock", "view", str(folder), "--port", "0", "--no-browser"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server,
        sync_playwright() as driver,
    ):
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["url"].split("#")[0]
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        before = rss_mb(server.pid)
        for name, place in SCREENS.items():
            found[name] = [_drawn(browser, address + place.format(middle=f"train-{groups // 2}")) for _ in range(2)]
        grown = rss_mb(server.pid) - before
        browser.close()
        server.terminate()
    return found, grown


def _drawn(browser: Any, url: str) -> float:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    start = time.perf_counter()
    page.goto(url)
    page.wait_for_selector("body[data-ready]", state="attached", timeout=60_000)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it is painted
    seconds = time.perf_counter() - start
    assert page.locator(".error").count() == 0, page.locator("main").inner_text()[:500]
    page.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--run", type=Path, help="a run that is there already, of --rollouts rollouts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(sys.argv[1:] if sys.argv[0].endswith("view.py") else [])
    sizes, told = [max(800, options.rollouts // 100), options.rollouts], dict[int, dict[str, Any]]()
    for rollouts in sizes[1:] if options.run else sizes:
        with tempfile.TemporaryDirectory(prefix="penstock-view-bench-") as root:
            path = options.run or make_run(Path(root), rollouts, options.calls).path
            size_mb, before = (path / "pool.db").stat().st_size / 1e6, rss_mb()
            if options.browser:
                screens, grown = paint(path, rollouts // GROUP_SIZE)
            else:
                screens = asyncio.run(measure(path, rollouts // GROUP_SIZE))
                grown = rss_mb() - before
            told[rollouts] = {"pool_mb": size_mb, "screens": screens, "grown_mb": grown}
    if options.json:
        print(json.dumps(told))
        return
    for rollouts, found in told.items():
        size = f"{rollouts:,} rollouts, {rollouts * options.calls:,} calls, pool {found['pool_mb']:,.0f} MB"
        print(f"{size}; server +{found['grown_mb']:.0f} MB")
        for name, (first, again) in found["screens"].items():
            print(f"  {name:10} first {first * 1000:7.1f} ms, then {again * 1000:7.1f} ms{'' if first < LIMIT_S else '  TOO SLOW'}")


if __name__ == "__main__":
    main()
