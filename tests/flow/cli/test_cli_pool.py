"""`penstock pool` on the folder of a run: what it prints, what it refuses, and that it leaves a running process alone."""

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_cases import USER, called, served

from penstock.cli.app import run
from penstock.cli.pool import app
from penstock.pool.base import Pool
from penstock.pool.sqlite import SqlitePool
from penstock.records import End, Grade, Mark, Task, make_rollout
from penstock.testing import make_node, make_step

TASK = Task(id="t1", prompt=({"role": "user", "content": "6 · 7?"},), label="42")


def act(folder: Path, work: Callable[[Pool], Awaitable[None]]) -> None:
    async def whole() -> None:
        pool = SqlitePool(folder)
        try:
            await work(pool)
        finally:
            await pool.close()

    asyncio.run(whole())


async def add_step(pool: Pool, rollout_id: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}}
    node = make_node(
        rollout_id, 0, (1, 2, 3), messages=TASK.prompt, tools=({"type": "function", "function": {"name": "multiply"}},)
    )
    step = make_step(
        rollout_id,
        0,
        (4, 5),
        logprobs=(-0.5, -0.25),
        versions=(3, 4),
        message={"role": "assistant", "content": "I will multiply.", "tool_calls": [call]},
    )
    await pool.append(step, node)


async def fill(pool: Pool, groups: int = 3) -> None:
    for seq in range(groups):
        rollouts = [make_rollout(f"train-{seq}", TASK.id, place) for place in range(2)]
        await pool.open_group(TASK, rollouts, seq=seq)
        for rollout in rollouts:
            await add_step(pool, rollout.id)
            await pool.grade(Grade(rollout_id=rollout.id, reward=rollout.place, source="exact"))
    await pool.mark(Mark(rollout_id="train-0.1.1", quality=0.5, note="short"))
    await pool.end("train-0.0.1", End.COMPLETED)
    await pool.end("train-0.1.1", End.AGENT_ERROR, "ValueError: no\nanswer")
    await pool.open_group(TASK, [make_rollout("val-0", TASK.id, 0, channel="val")], seq=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run, as a gateway makes it."""
    folder = tmp_path / "run"
    act(folder, fill)
    (folder / "config.json").write_text(json.dumps({"config": {"pool": {"name": "sqlite"}}, "datasets": {}}))
    return folder


def reported(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> dict[str, Any]:
    """What a command prints as JSON."""
    capsys.readouterr()
    assert run(["pool", *map(str, arguments), "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out or said.err.splitlines()[-1])


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    """What it prints for a person, on stdout where it is well."""
    capsys.readouterr()
    assert run(["pool", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    return printed.out or printed.err


def test_stats_counts_each_channel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = reported(capsys, "stats", folder)
    train = stats["channels"]["train"]
    assert (train["groups"], train["groups_by_state"], train["rollouts"]) == (3, {"open": 2, "ready": 1}, 6)
    assert (train["steps"], train["tokens"], train["ends"]) == (6, 12, {"completed": 1, "agent_error": 1})
    assert stats["channels"]["val"]["groups_by_state"] == {"open": 1}
    assert stats["bytes"] == (folder / "pool.db").stat().st_size
    assert stats["bytes_per_step"] == stats["bytes"] / 6
    text = said(capsys, "stats", folder)
    assert "Channel train" in text and "3: 2 open, 1 ready" in text and "4 running" in text


def test_show_lists_groups_page_by_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [group["id"] for group in reported(capsys, "show", folder)["groups"]] == ["train-0", "train-1", "train-2", "val-0"]
    assert [group["id"] for group in reported(capsys, "show", folder, "--limit", 1)["groups"]] == ["train-2", "val-0"]
    page = reported(capsys, "show", folder, "--channel", "train", "--first", 0, "--limit", 2)["groups"]
    assert [(group["id"], group["ends"], group["reward"]) for group in page] == [
        ("train-0", {"completed": 1, "agent_error": 1}, 0.0),
        ("train-1", {"running": 2}, None),
    ]
    assert "train-0  t1    2         1 completed, 1 agent_error  0.000   2      4" in said(capsys, "show", folder)


def test_show_of_group_lists_rollouts_and_of_rollout_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(one["id"], one["end"]) for one in reported(capsys, "show", folder, "train-0")["rollouts"]] == [
        ("train-0.0.1", "completed"),
        ("train-0.1.1", "agent_error"),
    ]
    attempt = reported(capsys, "show", folder, "train-0.1.1")["attempt"]
    assert (attempt["steps"][0]["completion_ids"], attempt["steps"][0]["versions"]) == ([4, 5], [3, 4])
    text = said(capsys, "show", folder, "train-0.1.1")
    for part in ("agent_error: ValueError: no", "1 from exact", "quality 0.5, short", "tools multiply", "I will multiply."):
        assert part in text
    assert "0     main        3           2        3-4      stop" in text


def test_verify_reports_sound_and_damaged_pools(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = reported(capsys, "verify", folder)
    assert (found["status"], found["groups"], found["rollouts"], found["steps"], found["findings"]) == ("sound", 4, 7, 6, [])
    with closing(sqlite3.connect(folder / "pool.db")) as other, other:
        other.execute("UPDATE steps SET logprobs = zeroblob(8) WHERE rollout_id = 'train-1.0.1'")
        other.execute("UPDATE rollouts SET message = x'58' WHERE id = 'train-0.1.1'")
        other.execute("DELETE FROM nodes WHERE rollout_id = 'train-2.0.1'")
        other.execute("UPDATE ledger SET version = 9")
        other.execute("UPDATE tally SET n = n + 1 WHERE kind = 'count' AND name = 'steps'")
    found = reported(capsys, "verify", folder, code=1)
    hit = {(finding["table"], finding["id"]) for finding in found["findings"]}
    assert {("steps", "train-1.0.1"), ("rollouts", "train-0.1.1"), ("steps", "train-2.0.1"), ("tally", "")} <= hit
    assert "is DAMAGED" in said(capsys, "verify", folder, code=1)


def test_verify_names_a_file_that_is_no_pool_any_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pool.db").write_bytes(b"\0" * 20_000)
    [finding] = reported(capsys, "verify", folder, code=1)["findings"]
    assert finding["table"] == "file"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_export_comes_back_by_import(form: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrote = reported(capsys, "export", folder, "--format", form, "--out", tmp_path / "out")
    assert (wrote["groups"], wrote["rollouts"], wrote["channels"]) == (4, 7, ["train", "val"])
    assert reported(capsys, "import", tmp_path / "out", "--into", tmp_path / "back")["known"] == 0
    assert reported(capsys, "import", tmp_path / "out", "--into", tmp_path / "back")["known"] == 6
    assert reported(capsys, "verify", tmp_path / "back")["status"] == "sound"
    for name in ("train-0.1.1", "train-2.0.1", "val-0.0.1"):
        assert reported(capsys, "show", tmp_path / "back", name) == reported(capsys, "show", folder, name)


def test_an_export_of_one_channel_holds_that_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(capsys, "export", folder, "--channel", "val", "--out", tmp_path / "val.jsonl")["groups"] == 1
    assert "4 groups, 7 rollouts, 6 steps" in said(capsys, "export", folder, "--format", "atif", "--out", tmp_path / "atif")
    assert len(list((tmp_path / "atif").iterdir())) == 7


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stats", "absent"], "not a run folder"),
        (["show", "RUN", "nobody"], "no rollout or group 'nobody'"),
        (["show", "RUN", "--channel", "tain"], "no group in channel 'tain'; there is train, val"),
        (["export", "RUN", "--format", "csv", "--out", "x"], "unknown export format 'csv'"),
        (["export", "RUN", "--out", "RUN"], "is there already"),
        (["export", "RUN", "--format", "atif", "--out", "x.json"], "give a folder"),
        (["import", "absent", "--into", "new"], "no such file"),
        (["import", "RUN", "--into", "new"], "ATIF leaves out"),
        (["import", "RUN/config.json", "--into", "new"], "not an export of a pool"),
        (["import", "RUN", "--into", "RUN/config.json"], "ATIF leaves out"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    text = said(capsys, *(part.replace("RUN", "run") for part in arguments), code=2)
    assert line in text and text.count("\n") == 1
    assert not (folder.parent / "new").exists()


def test_run_that_kept_nothing_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": {"pool": {"name": "memory"}}, "datasets": {}}))
    assert "kept its steps in memory" in said(capsys, "stats", tmp_path, code=2)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"pool": {"name": "sqlite"}}, "datasets": {}}))
    assert "has no pool.db yet" in said(capsys, "verify", tmp_path, code=2)
    assert not (tmp_path / "pool.db").exists()


def test_compact_frees_space_and_refuses_open_pools(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(folder / "pool.db", isolation_level=None)) as other:
        other.execute("CREATE TABLE ballast AS SELECT randomblob(400000) AS bytes")
        other.execute("DROP TABLE ballast")

    async def meanwhile(pool: Pool) -> None:
        found = await asyncio.to_thread(reported, capsys, "compact", folder, code=1)
        assert "another process has it open; stop the training" in found["error"]["message"]
        await pool.end("train-1.0.1", End.COMPLETED)

    act(folder, meanwhile)
    shrunk = reported(capsys, "compact", folder)
    assert shrunk["bytes_after"] < shrunk["bytes_before"] - 390_000
    assert reported(capsys, "verify", folder)["status"] == "sound"
    with closing(sqlite3.connect(folder / "pool.db")) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_looking_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "pool.db").read_bytes()
    for arguments in (["stats", folder], ["show", folder], ["verify", folder]):
        reported(capsys, *arguments)
    assert (folder / "pool.db").read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_pool_that_cannot_be_written_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.chmod(0o500)
    try:
        assert reported(capsys, "verify", folder)["status"] == "sound"
    finally:
        folder.chmod(0o700)


@pytest.mark.slow
def test_gateway_that_serves_is_looked_into_and_continues(tmp_path: Path) -> None:
    with served(tmp_path) as gateway:
        opened = gateway.rollout()
        for _ in range(2):
            assert gateway.chat(opened["token"], USER)[0] == 200
            assert called(tmp_path, "pool", "verify", tmp_path / "run").returncode == 0
        stats = json.loads(called(tmp_path, "pool", "stats", tmp_path / "run", "--json").stdout)
        assert stats["channels"]["adhoc"]["steps"] == 2
        assert opened["rollout_id"] in called(tmp_path, "pool", "show", tmp_path / "run", opened["rollout_id"]).stdout
        assert called(tmp_path, "pool", "compact", tmp_path / "run").returncode == 1
        assert gateway.chat(opened["token"], USER)[0] == 200
        assert gateway.stop()[0] == 0


def test_every_command_of_the_page_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "dashboard.md").read_text()
    lines = re.findall(r"^penstock (pool \w+ [^#\n]*)", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    act(tmp_path / "runs" / "multiply", lambda pool: fill(pool, groups=4))
    for line in lines:
        assert said(capsys, *line.split()[1:]), line
    assert {line.split()[1] for line in lines} == {command.name or command.callback.__name__ for command in app.registered_commands}
