"""The dashboard's screens as JSON, over HTTP routes without a socket: of finished, crashed, copied and PostgreSQL runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from postgres_server import server_url
from view_cases import HOSTILE, Screens, make_evaluation, make_run, metrics

from penstock.run.folder import RunFolder
from penstock.view.app import HEADERS
from penstock.view.timeline import timeline


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root)
    make_evaluation(root, "before", {0: [1.0, 1.0], 1: [1.0, 0.0]})
    make_evaluation(root, "after", {0: [0.0, 0.0], 1: [1.0, 1.0]})
    return root


@pytest.fixture(scope="module")
def screens(root) -> Screens:
    return Screens(root)


def test_runs_are_listed_with_their_reward_and_status(screens):
    found = {run["id"]: run for run in screens.get("runs")["runs"]}
    assert set(found) == {"run", "before", "after"}
    run = found["run"]
    assert (run["kind"], run["status"], run["model"], run["step"], run["steps"]) == ("train", "finished", HOSTILE, 3, 3)
    assert run["spark"] == [0.5, 0.5, 0.5] and (found["before"]["kind"], found["before"]["reward"]) == ("eval", 0.5)


def test_a_run_shows_what_was_lost_and_why(screens):
    reported = screens.get("run", run="run")
    assert reported["lost"]["ends"] == {"agent_error": 1}
    assert reported["lost"]["masked"] == {"greedy": 24, HOSTILE: 3} and reported["lost"]["breaks"] == {"history_edited": 28}
    assert (
        "temperature 0" in reported["reasons"]["masked"]["greedy"]
        and "raised an error" in reported["reasons"]["ends"]["agent_error"]
    )
    assert [(alarm["kind"], alarm["count"]) for alarm in reported["alarm_counts"]] == [("rollout.forged", 1)]
    assert [(each["step"], each["reward"]) for each in reported["heldout"]] == [(0, 0.2), (2, 0.6)]


def test_curves_have_an_interval_and_continue_from_a_step(screens):
    reported = screens.get("metrics", run="run", after=1)
    assert reported["steps"] == [2, 3] and reported["columns"]["entropy"] == [0.5, pytest.approx(1 / 3)]
    assert reported["columns"]["margin"][0] == pytest.approx(1.96 * 0.5345 / 8**0.5, rel=1e-3)  # of 0, 1, 0, 1, …
    assert reported["columns"]["length"] == [5.0, 5.0]


def test_named_parts_of_reward_are_curves_that_begin_at_zero(tmp_path):
    make_run(tmp_path)
    line = {**metrics(4, []), "components/format": 0.25}
    RunFolder(tmp_path / "run", resumed=True).add_metrics(line)
    reported = Screens(tmp_path).get("metrics", run="run")
    assert reported["steps"] == [1, 2, 3, 4] and reported["columns"]["components/format"] == [0.0, 0.0, 0.0, 0.25]


def test_a_step_opens_its_groups_with_rewards_and_advantages(screens):
    reported = screens.get("step", run="run", step=1)
    assert [group["id"] for group in reported["groups"]] == ["train-0", "train-1"]
    assert (reported["last"], screens.get("step", run="run", step=3)["last"]) == (False, True)
    second = reported["groups"][1]["rollouts"]
    assert [each["reward"] for each in second] == [0.0, 1.0, 0.0, 1.0]
    assert [round(each["advantage"], 3) for each in second] == [-1.0, 1.0, -1.0, 1.0]
    assert [each["tokens"] for each in second] == [5] * 4


def test_a_group_shows_where_its_attempts_part(screens):
    reported = screens.get("group", run="run", group="train-1")
    assert (reported["state"], reported["step"], reported["parting"]) == ("trained", 1, 4)  # three of the prompt, one of the reply
    assert {each["parts_at"] for each in reported["attempts"]} == {0}
    assert reported["attempts"][0]["next"] != reported["attempts"][1]["next"]


def test_rollout_shows_its_reward_and_its_calls(screens):
    good = screens.get("rollout", run="run", rollout="train-0.1.1")
    assert (good["reward"], good["why"]) == (1.0, f"grader {HOSTILE} gave 1 to the whole rollout.")
    assert [(call["trained"], call["mask"]) for call in good["calls"]] == [(True, None), (True, None), (False, "greedy")]
    assert (good["calls"][2]["break"], good["calls"][1]["parent"], good["credit"]["step"]) == ("history_edited", 0, 1)
    failed = screens.get("rollout", run="run", rollout="train-0.3.1")
    assert failed["reward"] is None and "ended as agent_error: boom" in failed["why"]
    assert {call["mask"] for call in failed["calls"]} == {"ungraded"}
    curated = screens.get("rollout", run="run", rollout="train-1.0.1")
    assert [call["mask"] for call in curated["calls"]] == [None, "curated", "greedy"]
    waiting = screens.get("rollout", run="run", rollout="train-6.1.1")
    assert (waiting["calls"][0]["mask"], waiting["credit"]["state"]) == ("not_trained", "complete")


def test_a_judges_note_is_shown_with_the_rollout(root):
    folder = root / "run" / "artifacts" / "train-0.0.1"
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_text('{"score": 0.0, "explanation": "too short <b>"}')
    assert Screens(root).get("rollout", run="run", rollout="train-0.0.1")["note"] == "too short <b>"


def test_custom_grader_note_is_shown_and_links_not_followed(root):
    folder = root / "run" / "artifacts" / "train-1.1.1"
    folder.mkdir(parents=True)
    (folder / "note.txt").write_bytes(b"42 was expected \xff")
    assert Screens(root).get("rollout", run="run", rollout="train-1.1.1")["note"] == "42 was expected \ufffd"
    (folder / "note.txt").rename(folder / "elsewhere")
    (folder / "note.txt").symlink_to(folder / "elsewhere")
    assert Screens(root).get("rollout", run="run", rollout="train-1.1.1")["note"] == ""


def test_exact_request_of_call_has_all_messages_on_its_path(screens):
    reported = screens.get("call", run="run", rollout="train-0.1.1", call=1)
    assert [message["role"] for message in reported["request"]["messages"]] == ["user", "assistant", "tool"]
    assert reported["request"]["tools"][0]["function"]["name"] == HOSTILE


def test_tokens_carry_what_engine_and_trainer_recorded(screens):
    reported = screens.get("tokens", run="run", rollout="train-0.1.1", call=1)
    assert reported["ids"] == [1, 2, 3, 5, 7, 4, 5, 7] and reported["sampled_by"] == [None, None, None, 0, 0, None, 1, 1]
    assert (reported["gap"], reported["token_advantages"], reported["trained"]) == ([0.125, 0.0], [1.5, 1.5], True)
    assert reported["logprobs"] == [-0.5, -0.5] and reported["versions"] == [0, 0] and reported["has_text"]
    without = screens.get("tokens", run="run", rollout="train-2.1.1", call=0)
    assert without["gap"] is None and without["entropy"] is None and round(without["advantage"], 3) == 1.0
    broken = screens.get("tokens", run="run", rollout="train-0.1.1", call=2)
    assert broken["breaks"][0]["reason"] == "history_edited" and broken["mask"] == "greedy"


def test_the_timeline_has_agents_graders_trainer_and_publications(screens):
    reported = screens.get("timeline", run="run")
    lanes = [span["lane"] for span in reported["spans"]]
    assert lanes.count("agents") == 28 and lanes.count("graders") == 28 and lanes.count("publications") == 3
    assert [span["name"] for span in reported["spans"] if span["lane"] == "trainer"][:2] == [
        "waits for groups of step 1",
        "update of step 1",
    ]


def test_times_in_which_neither_engine_nor_trainer_works_are_idle(tmp_path):
    times = {"step.start": 100.0, "train.start": 104.0, "train.step": 106.0, "run.end": 110.0}
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"time": at, "kind": kind, "step": 1}) + "\n" for kind, at in times.items())
    )
    reported = timeline(tmp_path, None, until=None)
    assert [(span["start"], span["end"]) for span in reported["spans"] if span["lane"] == "idle"] == [
        (100.0, 104.0),
        (106.0, 110.0),
    ]
    assert (reported["busy"]["trainer"], reported["busy"]["idle"]) == (pytest.approx(0.2), pytest.approx(0.8))


def test_the_pool_grows_by_what_each_step_adds(screens):
    reported = screens.get("metrics", run="run")["columns"]
    assert (reported["total_rollouts"], reported["total_tokens"]) == ([8, 16, 24], [40, 80, 120])


def test_pool_shows_each_group_once_in_the_ledger(screens):
    reported = screens.get("pool", run="run")
    assert reported["check"] == {"lines": 6, "groups": 6, "trained": 6, "is_exact": True}
    assert [line["group_id"] for line in reported["ledger"]] == [f"train-{n}" for n in (5, 4, 3, 2, 1, 0)]


def test_notices_of_runs_and_evaluations_are_shown(screens):
    assert screens.get("run", run="run")["lost"]["notices"] == {f"ignored:{HOSTILE}": 1}
    listed = {each["id"]: each["notices"] for each in screens.get("evals")["evaluations"]}
    assert listed["before"] == {"finish:length": 2, f"ignored:{HOSTILE}": 1}


def test_evaluations_are_compared_by_task_worst_regression_first(screens):
    reported = screens.get("evals", runs="before,after")
    assert [(row["task"], row["change"]) for row in reported["rows"]] == [("task-0", -1.0), ("task-1", 0.5)]
    assert [row["prompt"] for row in reported["rows"]] == [f"0 {HOSTILE}", f"1 {HOSTILE}"]
    paired = reported["columns"][1]["paired"]
    assert (paired["value"], reported["columns"][1]["shared"]) == (-0.25, 2)


def test_long_texts_are_cut_and_say_so(screens):
    text = screens.get("rollout", run="run", rollout="train-2.0.1")["calls"][1]["messages"][0]["content"]
    assert len(text) < 20_100 and text.endswith("(980,000 more characters)")


def test_a_search_finds_steps_groups_and_rollouts(screens):
    kinds = [screens.get("find", run="run", text=text)["kind"] for text in ("2", "train-1", "train-1.0.1", "nothing' OR 1=1")]
    assert kinds == ["step", "group", "rollout", None]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("run", 400),
        ("run?run=../secret", 404),
        ("run?run=%00", 404),
        ("run?run=/etc", 404),
        ("rollout?run=run&rollout=nobody", 404),
        ("tokens?run=run&rollout=train-0.0.1&call=99", 404),
        ("tokens?run=run&rollout=train-0.0.1&call=x", 400),
        ("group?run=run&group=nobody", 404),
        ("step?run=run&step=99", 404),
        ("timeline?run=run&span=abc", 400),
        ("nothing", 404),
    ],
)
def test_bad_input_is_refused_with_a_reason(screens, path, status):
    answer = screens.ask(f"/api/{path}")
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_other_hosts_are_rejected_and_policy_is_strict(screens):
    assert screens.ask("/api/runs", headers={"host": "evil.example"}).status_code == 421
    assert screens.ask("/api/runs", headers={"origin": "https://evil.example"}).status_code == 403
    assert screens.ask("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    for path in ("/", "/main.js", "/api/runs", "/api/run"):
        answer = screens.ask(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_with_a_token_nothing_is_read_without_it(root):
    closed = Screens(root, token="the token")
    assert closed.ask("/").status_code == 200 and closed.ask("/api/runs").status_code == 401
    assert closed.ask("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert closed.ask("/api/runs", headers={"authorization": "Bearer the token"}).status_code == 200


def test_single_run_shows_no_other_next_to_it(root):
    one = Screens(root / "run")
    assert [run["id"] for run in one.get("runs")["runs"]] == ["run"]
    assert one.ask("/api/run", run="before").status_code == 404


def test_a_link_out_of_the_folder_is_not_followed(root, tmp_path):
    make_run(tmp_path, "outside")
    (root / "linked").symlink_to(tmp_path / "outside")
    assert Screens(root).ask("/api/run", run="linked").status_code == 404


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_looking_changes_nothing_in_the_folder(root, screens):
    before = content(root)
    for path in (
        "runs",
        "run?run=run",
        "metrics?run=run",
        "step?run=run&step=1",
        "groups?run=run",
        "ended?run=run&end=agent_error",
    ):
        assert screens.ask(f"/api/{path}").status_code == 200
    screens.get("tokens", run="run", rollout="train-0.1.1", call=0)
    screens.get("timeline", run="run")
    screens.get("pool", run="run")
    assert content(root) == before


CRASH = """
import os, sys
sys.path.append(sys.argv[2])
import view_cases
from pathlib import Path
from penstock.pool.sql_pool import SqlPool
async def no_close(self): pass
SqlPool.close = no_close
view_cases.make_run(Path(sys.argv[1]), finished=False)
os._exit(9)
"""


def test_crashed_run_is_read_from_its_log(tmp_path):
    helpers = str(Path(__file__).parents[2] / "helpers")
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), helpers], capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stderr
    assert (tmp_path / "run" / "pool.db-wal").stat().st_size > 0
    os.utime(tmp_path / "run" / "events.jsonl", (1, 1))
    for place in (tmp_path / "run", Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))):
        reported = Screens(place).get("run", run=place.name)
        assert (reported["status"], reported["stats"]["groups_trained"], reported["step"]) == ("interrupted", 6, 3)
    assert (tmp_path / "run" / "pool.db-wal").stat().st_size > 0


def test_damaged_metrics_lines_are_left_out_and_counted(tmp_path):
    folder = make_run(tmp_path)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(lines[0] + lines[1].replace(b'"reward":0.5', b'"reward":0.9') + lines[2][:50])
    reported = Screens(folder).get("run", run="run")
    assert (reported["step"], reported["damaged"]) == (1, 1)


def test_growing_run_is_read_on_and_replaced_one_again(tmp_path):
    folder = make_run(tmp_path)
    screens, file = Screens(folder), folder / "metrics.jsonl"
    whole = file.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    file.write_bytes(first)
    assert screens.get("metrics", run="run")["steps"] == [1]
    file.write_bytes(whole)
    assert screens.get("metrics", run="run")["steps"] == [1, 2, 3]
    (folder / "new").write_bytes(first)
    (folder / "new").replace(file)
    assert screens.get("metrics", run="run")["steps"] == [1]


def test_a_postgres_run_is_read_like_any_other(tmp_path):
    folder = make_run(tmp_path, "viewed", pool="postgres", url=server_url())
    screens = Screens(folder)
    assert screens.get("run", run="viewed")["stats"]["groups_trained"] == 6
    assert screens.get("rollout", run="viewed", rollout="train-0.1.1")["reward"] == 1.0
    assert screens.get("pool", run="viewed")["check"]["is_exact"]
    assert len(screens.get("ended", run="viewed", end="agent_error")["rollouts"]) == 1
    assert screens.get("tokens", run="viewed", rollout="train-0.1.1", call=1)["gap"] == [0.125, 0.0]
