"""Agents that try to grade themselves and to read what only their grader may see: the same attempts under every executor.

No forged grade counts anywhere. An executor that isolates lets them read nothing; one that cannot reports it at the start.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_cases import environment, penstock
from eval_cases import attempts

from penstock.records import End, Rollout
from penstock.rollout.runner import FORGED_GRADE
from penstock.system.sandbox import choose_sandbox

CHEATING = Path(__file__).parent / "cheating"
LABEL, MARK = "the-label-itself", "of-the-parent"
CHEATS = ("key_file", "artifacts_path", "parent_environment", "parent_memory", "garbage_collector", "pool_file", "grade_in_pool")
CHEATS += ("end_in_pool", "dataset_file", "neighbours", "neighbours", "own_token")
CONFIG = """
run.name = "cheating"
model.name = "tiny"
engine.name = "cli_engine:open_engine"
dataset.train = "tasks.jsonl"
"""
COMMAND = f"""
[agent]
command = [{sys.executable!r}, "cheats.py"]
entry = "grader.py"
"""
EXECUTORS = {
    "inline": "",
    "process": '[rollout]\nexecutor = "process"\n',
    "fresh process": '[rollout]\nexecutor = "process"\n[executor]\nfresh = true\n',
    "process without a sandbox": '[rollout]\nexecutor = "process"\n[executor]\nsandbox = "off"\n',
    "command": COMMAND,
    "command in a process": f'{COMMAND}\n[rollout]\nexecutor = "process"\n',
    "ray": '[rollout]\nexecutor = "ray"\n',
    "command on ray": f'{COMMAND}\n[rollout]\nexecutor = "ray"\n',
    "server": '[rollout]\nexecutor = "server"\n[executor]\nurls = ["SERVER"]\n',
}
SLOW = ("fresh process", "process without a sandbox", "command in a process", "ray", "command on ray")
OPEN = ("inline", "process without a sandbox", "ray", "server")
"""Executors whose agents can read what the run's user can. All but the last say so at their start."""


@dataclass(frozen=True)
class CheatingRun:
    folder: Path
    attempts: list[Rollout]
    found: dict[str, list[dict[str, Any]]]
    """By cheat: what its agents could read, and the answers that they got."""
    events: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def isolates(self) -> bool:
        notices = [event["text"] for event in self.events if event["kind"] == "notice"]
        return not any("without a sandbox" in text or "trusted" in text or "every user can" in text for text in notices)


@contextmanager
def rollout_server(project: Path) -> Iterator[str]:
    port = 20_000 + secrets.randbelow(20_000)
    command = penstock("rollout", "serve", "agent.py", "--port", port)
    with subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def evaluate(project: Path, config: str) -> CheatingRun:
    """Runs each cheat once; `runs/old` has what earlier versions left in a run folder."""
    shutil.copytree(CHEATING, project, dirs_exist_ok=True)
    rows = [{"prompt": name, "ground_truth": LABEL, "metadata": {"cheat": name}} for name in CHEATS]
    (project / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "eval.toml").write_text(CONFIG + config)
    for key in ("runs/old/secret", "home/token", "home/vault.key"):
        (project / key).parent.mkdir(parents=True, exist_ok=True)
        (project / key).write_bytes(secrets.token_bytes(32))
    (project / "started").mkdir()
    command = penstock("eval", "run", "eval.toml", "--json", "--set", "rollout.concurrency=32", "--set", "run.folder=runs")
    env = environment() | {"PENSTOCK_HOME": str(project / "home"), "PENSTOCK_MARK": MARK}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = project / json.loads(done.stdout)["folder"]
    found: dict[str, list[dict[str, Any]]] = {}
    for file in project.rglob("found.json"):
        left = json.loads(file.read_text())
        found.setdefault(left["cheat"], []).append(left)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return CheatingRun(folder, attempts(folder), found, events, json.loads(done.stdout))


@pytest.mark.parametrize("executor", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in EXECUTORS])
def test_forged_grades_do_not_count_and_secrets_stay_hidden(tmp_path: Path, executor: str) -> None:
    if executor == "server":
        shutil.copytree(CHEATING, tmp_path, dirs_exist_ok=True)
        with rollout_server(tmp_path) as url:
            run = evaluate(tmp_path, EXECUTORS[executor].replace("SERVER", url))
    else:
        run = evaluate(tmp_path, EXECUTORS[executor])
    check_all_was_tried(run, executor)
    check_nothing_counts(run)
    if executor in OPEN:
        assert executor == "server" or not run.isolates
        assert all(run.found[cheat][0]["read"] for cheat in ("dataset_file", "pool_file", "grade_in_pool", "end_in_pool"))
    elif run.isolates:
        assert [found for each in run.found.values() for found in each if found["read"]] == []
    else:
        assert not choose_sandbox("auto", auto=("bubblewrap",)).isolates


def check_all_was_tried(run: CheatingRun, executor: str) -> None:
    assert {cheat: len(found) for cheat, found in run.found.items()} == {cheat: CHEATS.count(cheat) for cheat in CHEATS}
    statuses = {status for found in run.found.values() for each in found for status in each["statuses"]}
    assert run.found["own_token"][0]["statuses"]
    assert statuses <= {401, 403, 409}
    if executor == "inline":  # the key is in its memory, and opens nothing
        assert set(run.found["garbage_collector"][0]["statuses"]) == {409}
        assert len([event for event in run.events if event["kind"] == "grading.refused"]) >= 3


def check_nothing_counts(run: CheatingRun) -> None:
    assert len(run.attempts) == len(CHEATS)
    assert {attempt.reward for attempt in run.attempts} <= {0.0, None}
    assert run.summary["outcome"]["reward"]["value"] == 0.0
    ends = [(attempt.end, attempt.message) for attempt in run.attempts if attempt.end is not End.COMPLETED]
    assert all(end is End.GRADER_ERROR and message.startswith(FORGED_GRADE) for end, message in ends), ends
    written = [cheat for cheat in ("grade_in_pool", "end_in_pool") if run.found[cheat][0]["read"]]
    assert len([event for event in run.events if event["kind"] == "rollout.forged"]) == len(written)
    assert not list(run.folder.rglob("secret"))


def test_a_command_that_is_recorded_cannot_grade_itself(tmp_path: Path) -> None:
    shutil.copytree(CHEATING, tmp_path, dirs_exist_ok=True)
    (tmp_path / "started").mkdir()
    code = """if True:
        import json, os, cheats
        values = [os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PENSTOCK_ROLLOUT_ID")]
        for name in ("key_file", "parent_environment", "parent_memory", "pool_file", "grade_in_pool", "own_token"):
            os.makedirs(name)
            cheats.cheat(name, *values, name)
        print(json.dumps([json.load(open(f"{name}/found.json")) for name in os.listdir() if os.path.exists(f"{name}/found.json")]))
    """
    command = penstock("run", "--engine", "cli_engine:open_engine", "--model", "tiny", "--folder", "runs/recorded", "--json", "--")
    env = environment() | {"PENSTOCK_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*command, sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6
    assert {status for each in found for status in each["statuses"]} <= {401, 403, 409}
    if choose_sandbox("auto", auto=("bubblewrap",)).isolates:
        assert [each for each in found if each["read"] and each["cheat"] != "parent_environment"] == []


def test_links_in_the_artifacts_folder_lead_nowhere(tmp_path: Path) -> None:
    from penstock.rollout.executors.base import make_safe, move_folder

    folder, outside = tmp_path / "scratch", tmp_path / "pool.db"
    outside.write_text("labels")
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("kept")
    for name, target in {"absolute": outside, "relative": "../pool.db", "folder": tmp_path, "inside": "inner/file"}.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "inner" / "pipe")
    assert sorted(make_safe(folder)) == ["absolute", "folder", "inner/pipe", "relative"]
    move_folder(folder, tmp_path / "artifacts" / "r")
    kept = tmp_path / "artifacts" / "r"
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*")) == ["inner", "inner/file", "inside"]
    assert (kept / "inside").read_text() == "kept"
    assert not folder.exists()
