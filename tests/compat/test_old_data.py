"""Folders that an earlier version wrote: they are read, checked, exported and continued as if made today. See README.md."""

import json
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

RUN, GATEWAY, BEFORE, AFTER = "runs/train", "runs/gateway", "runs/evals/before", "runs/evals/after"


def counts(stats, channel="train"):
    found = stats["channels"][channel]
    return found["groups"], found["rollouts"], found["steps"], found["tokens"], found["ends"], found["groups_by_state"]


def test_report_of_old_run_is_written_again(project, reported):
    page = project / RUN / "report.html"
    page.unlink()
    reported("report", RUN)
    written = page.read_text()
    assert "0.375" in written and "And?" in written


def test_the_pool_of_an_old_run_has_what_was_recorded(project, reported):
    stats = reported("pool", "stats", RUN)
    assert counts(stats) == (4, 16, 32, 128, {"completed": 16}, {"trained": 4})
    assert counts(stats, "val") == (9, 9, 12, 48, {"agent_error": 3, "completed": 6}, {"ready": 9})
    shown = reported("pool", "show", RUN, "train-0.0.1")
    attempt, transcript = shown["attempt"], shown["transcripts"]["main"]
    first, second = attempt["steps"]
    assert shown["task"]["prompt"] == [{"role": "user", "content": "2?"}] and attempt["end"] == "completed"
    assert attempt["nodes"][0]["token_ids"] == [256, 259, 10, 50, 63, 257, 10, 256, 260, 10]
    assert first["completion_ids"] == [137, 162, 146, 246] and second["completion_ids"] == [161, 259, 121, 132]
    assert first["logprobs"] == pytest.approx([-5.555505, -5.634545, -5.490000, -5.521874], abs=1e-6)
    assert first["versions"] == [0, 0, 0, 0] and second["node"] == 1
    assert [message["role"] for message in transcript["messages"]] == ["user", "assistant", "user", "assistant"]
    assert shown["reward"] == 0.0 and attempt["grades"][0]["source"] == "Odd"


def test_the_tables_of_old_pools_are_sound(project, reported):
    for folder, size in ((RUN, (13, 25, 44)), (GATEWAY, (3, 3, 3)), (BEFORE, (3, 6, 8))):
        found = reported("pool", "verify", folder)
        assert (found["status"], found["groups"], found["rollouts"], found["steps"]) == ("sound", *size)


@pytest.mark.slow
def test_tokens_of_old_run_are_exact_under_its_checkpoints(project, reported):
    found = reported("verify", RUN)
    assert (found["status"], found["exact_tokens"], found["recomputed"]) == ("exact", 128, {"0": 64, "1": 64})


@pytest.mark.slow
def test_old_run_continues_from_its_checkpoint(project, reported):
    finished = reported("train", "train.toml")
    assert (finished["already_finished"], finished["steps"], finished["policy_version"]) == (True, 2, 2)
    found = reported("train", "train.toml", "--set", "train.steps=3")
    assert (found["status"], found["resumed"], found["steps"], found["policy_version"]) == ("finished", True, 3, 3)
    assert found["rollouts"] == 24 and found["exact_token_rate"] == 1.0
    assert counts(reported("pool", "stats", RUN))[5] == {"trained": 6}
    steps = [json.loads(line)["step"] for line in (project / RUN / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_an_old_gateways_groups_keep_their_states_rewards_and_marks(project, reported):
    assert counts(reported("pool", "stats", GATEWAY)) == (3, 3, 3, 12, {"completed": 2}, {"open": 1, "ready": 1, "trained": 1})
    groups = reported("pool", "show", GATEWAY)["groups"]
    assert [(group["id"], group["reward"], group["ends"]) for group in groups] == [
        ("call-0", 1.0, {"completed": 1}),
        ("call-1", 0.25, {"completed": 1}),
        ("call-2", None, {"running": 1}),
    ]
    reported("pool", "export", GATEWAY, "--out", "out.jsonl")
    marked = [line for line in Path("out.jsonl").read_text().splitlines() if "too short" in line]
    assert len(marked) == 1 and "call-1" in marked[0]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_old_pool_is_exported_and_imported_whole(project, reported, form):
    reported("pool", "export", GATEWAY, "--format", form, "--out", "out")
    reported("pool", "import", "out", "--into", "copy")
    assert counts(reported("pool", "stats", "copy")) == counts(reported("pool", "stats", GATEWAY))


def test_an_old_export_is_imported(project, reported):
    reported("pool", "import", "gateway.jsonl", "--into", "copy")
    assert counts(reported("pool", "stats", "copy")) == counts(reported("pool", "stats", GATEWAY))
    assert reported("pool", "show", "copy")["groups"] == reported("pool", "show", GATEWAY)["groups"]


@pytest.mark.slow
def test_old_gateway_continues_with_its_tokens_and_open_rollout(project, reported):
    known, config = json.loads(Path("open_rollout.json").read_text()), project / GATEWAY / "config.json"
    config.write_text(config.read_text().replace("/srv/penstock-old/project", str(Path.cwd())))  # where the model is now
    command = [sys.executable, "-m", "penstock", "gateway", "--model", "model", "--folder", GATEWAY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = json.loads(process.stdout.readline())
            message = {"role": "user", "content": "3?"}
            body = {"model": "any", "max_tokens": 4, "messages": [message]}
            assert post(ready, "/v1/chat/completions", known["token"], body) == 200
            control = json.loads((project / GATEWAY / "tokens.json").read_text())["control"]
            assert post(ready, f"/rollouts/{known['rollout_id']}/end", control, {"end": "completed"}) == 200
        finally:
            process.terminate()
    group = reported("pool", "show", GATEWAY)["groups"][2]
    assert (group["id"], group["steps"], group["ends"]) == ("call-2", 2, {"completed": 1})


def post(ready, path, token, body) -> int:
    connection = HTTPConnection(urlsplit(ready["base_url"]).netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), {"authorization": f"Bearer {token}", "content-type": "application/json"})
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def test_old_evaluations_are_compared(project, reported):
    found = reported("eval", "compare", BEFORE, AFTER)
    assert (found["tasks"], found["means"], found["difference"]["value"]) == (3, [1 / 2, 1 / 3], pytest.approx(-1 / 6))
    assert (found["better"], found["worse"], [each["steps"] for each in found["spent"]]) == (0, 1, [8, 8])


def test_an_old_evaluation_is_graded_again(project, reported):
    grader = "class Always(Grader):\n    async def grade(self, ctx):\n        ctx.set_reward(1.0)\n"
    agent = Path("agent.py").read_text()
    Path("other.py").write_text(agent[: agent.index("class Odd")] + grader)
    again = reported("eval", "regrade", BEFORE, "--name", "same")
    assert again["outcome"]["reward"]["value"] == 0.5
    other = reported("eval", "regrade", BEFORE, "--agent", "other.py", "--name", "other")
    assert other["outcome"]["reward"]["value"] == pytest.approx(4 / 6)
    assert other["outcome"]["ends"] == {"agent_error": 2, "completed": 4}


def test_the_same_command_finds_an_old_evaluation_finished(project, reported):
    arguments = ("--name", "before", "--model", "model", "--samples", "2", "--set", "eval.temperature=1.0")
    found = reported("eval", "run", "train.toml", *arguments)
    assert (found["resumed"], found["outcome"]["rollouts"], found["outcome"]["steps"]) == (6, 6, 8)


def test_the_dashboard_shows_old_folders_and_changes_nothing_in_them(project):
    from starlette.testclient import TestClient

    from penstock.view.app import make_view_app
    from penstock.view.sources import FolderSource

    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    client = TestClient(make_view_app(FolderSource(Path("runs")), names=None))
    kinds = {run["id"]: run["kind"] for run in client.get("/api/runs").json()["runs"]}
    assert kinds == {"train": "train", "gateway": "gateway", "evals/before": "eval", "evals/after": "eval"}
    reported = client.get("/api/run?run=train").json()
    assert (reported["stats"]["groups_trained"], reported["lost"]["ends"]) == (4, {"agent_error": 3})
    rollout = client.get("/api/rollout?run=train&rollout=train-0.0.1").json()
    assert (rollout["reward"], [call["tokens"] for call in rollout["calls"]]) == (0.0, [4, 4])
    assert client.get("/api/tokens?run=train&rollout=train-0.0.1&call=0").json()["logprobs"][0] == pytest.approx(
        -5.555505, abs=1e-6
    )
    assert client.get("/api/evals?runs=evals/before,evals/after").json()["columns"][1]["shared"] == 3
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before
