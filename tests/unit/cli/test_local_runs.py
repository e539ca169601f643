"""`penstock train|eval list, info, logs` read run folders, and start no controller."""

import json

import pytest

from penstock.cli.app import run
from penstock.config import make_config
from penstock.events import Events
from penstock.run.folder import RunFolder, open_run_folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PENSTOCK_CONTROLLER", raising=False)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2*3"}\n')
    yield tmp_path
    assert not (tmp_path / "home" / "address.json").exists()
    assert not list(tmp_path.glob("home/*.log")), "a controller was started"


def made(name: str = "mine", place: str = "runs", **summary: object) -> RunFolder:
    config = make_config(
        {"run": {"name": name, "folder": place}, "dataset": {"train": "tasks.jsonl"}, "train": {"steps": 4}}, "here"
    )
    folder = open_run_folder(config, fresh=False)
    training = place == "runs"
    if training:
        folder.add_metrics({"step": 1, "reward": 0.25, "version": 1})
    with Events(folder.events) as events:
        events.emit("stage", text="loading tiny")
        events.emit("run.start" if training else "eval.begin")
    if summary:
        folder.write_summary(json.dumps(summary).encode())
    return folder


def reported(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert run(list(arguments)) == code
    return capsys.readouterr()


def test_a_list_shows_the_run_folders_here(home, capsys):
    made()
    made("other", status="stopped")
    out, _ = reported(capsys, "train", "list")
    assert [line.split()[:2] for line in sorted(out.splitlines())] == [["NAME", "STATUS"], ["mine", "not"], ["other", "stopped"]]
    assert "1/4" in out and "runs/mine" in out
    rows = json.loads(reported(capsys, "train", "list", "--json")[0])
    assert {row["name"] for row in rows["local_runs"]} == {"mine", "other"} and rows["training_runs"] == []


def test_without_runs_the_list_says_how_to_begin(home, capsys):
    assert "begin with: penstock eval" in reported(capsys, "eval", "list")[1]


def test_info_and_logs_read_the_folder(home, capsys):
    made(status="finished", eval_before=0.25, eval_after=0.5, ends={"completed": 8}, checkpoint="runs/mine/checkpoints/1")
    out, _ = reported(capsys, "train", "info", "mine")
    for said in ("is finished", "runs/mine", "0.250 → 0.500", "8 completed", "penstock report runs/mine"):
        assert said in out
    assert "loading tiny" in reported(capsys, "train", "logs", "mine")[0]
    assert "loading tiny" in reported(capsys, "train", "logs", "runs/mine", "-f")[0]


SHORT = {kind: {"count": number, "reason": f"why {kind}"} for number, kind in enumerate(("failed", "ungraded", "wrong"), 1)}


def test_info_reports_failed_ungraded_and_wrong_each_with_its_reason(home, capsys):
    made().add_metrics({"step": 2, "reward": 0.0, "version": 1, "shortfalls": SHORT})
    made("first", "runs/evals", status="finished", outcome={"ends": {"completed": 6}, "shortfalls": SHORT})
    for command in (("train", "info", "mine"), ("eval", "info", "first")):
        out = reported(capsys, *command)[0]
        assert all(text in out for text in ("failed    1 (why failed)", "ungraded  2 (why ungraded)", "wrong     3 (why wrong)")), (
            out
        )


def test_run_of_the_other_kind_names_its_command(home, capsys):
    made()
    made("first", "runs/evals")
    for command in ("info", "logs"):
        said = reported(capsys, "train", command, "runs/evals/first", code=2)[1]
        assert "runs/evals/first is an evaluation; see: penstock eval info runs/evals/first" in said
        assert "runs/mine is a training run; see: penstock train info" in reported(capsys, "eval", command, "runs/mine", code=2)[1]


def test_a_recording_is_no_run_of_either_kind(home, capsys):
    (home / "rec").mkdir()
    (home / "rec/config.json").write_text(
        json.dumps({"config": {"model": {"name": "tiny"}, "run": {"name": "rec"}}, "datasets": {}})
    )
    assert "rec is a recording, no train run; see: penstock pool show rec" in reported(capsys, "train", "info", "rec", code=2)[1]


def test_an_unknown_run_is_refused_in_one_line(home, capsys):
    for command in ("info", "logs"):
        out, err = reported(capsys, "train", command, "none", code=2)
        assert (out, err.count("\n")) == ("", 1)
        assert "no run 'none' in runs/ here, and no controller runs" in err


def test_the_pace_in_old_logs_is_that_of_the_run(home, capsys):
    step = {"reward": 0.5, "groups": 2, "groups_equal": 0, "groups_stale": 0, "exact_token_rate": 1.0, "rollouts": 8, "ends": {}}
    step |= {"tokens_per_s": 100.0, "groups_set_aside": 0, "steps": 4, "replies": {}}
    start = {"time": 0.0, "kind": "run.start", "name": "mine", "folder": "runs/mine", "model": "tiny", "steps": 4, "first_step": 1}
    begun = {"time": 0.0, "kind": "step.start", "step": 1, "version": 0}
    events = [start | {"resumed": False}, begun, *({"time": 10.0 * n, "kind": "train.step", "step": n, **step} for n in (1, 2))]
    made().events.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "6/min steps, about 0:20 left" in reported(capsys, "train", "logs", "mine")[0]
