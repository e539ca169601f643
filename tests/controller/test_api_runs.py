"""Runs over the platform's API, asked for by a client written from its contract: accepted and refused requests."""

import json
import threading
import tracemalloc
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from api_cases import ENGINE_FOLDER, Served, archive, carry_out, own_run, project, served, upload
from api_client import ApiClient, Refused, exchange, fetch
from hypothesis import given
from hypothesis import strategies as st

from penstock_controller.api.links import SignedLinks
from penstock_controller.api.outputs import RowRanges
from penstock_controller.identity import THE_OWNER


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """A controller that has carried out the evaluation `asked`."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ENGINE_FOLDER))
        carry_out(folder, "asked")
    with served(folder) as found:
        found.controller.vault.set("WORD", "1 times 3?", "user", who=THE_OWNER)
        yield found


@pytest.fixture
def client(world: Served) -> ApiClient:
    return world.client()


def refused(work: Any, *arguments: Any, **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        work(*arguments, **options)
    assert caught.value.body["error"] and "Traceback" not in caught.value.body["error"]
    return caught.value


def test_evaluation_numbers_equal_those_by_hand(client):
    detail = client.info("eval", "asked")
    results = detail["results"]
    assert detail["eval_run"]["status"] == "finished" and detail["eval_run"]["completed_at"].endswith("Z")
    assert detail["config"] == {"k": [1, 2], "model_path": "tiny", "n": 2}
    assert (results["score"], results["total_runs"], results["sampled_rows"]) == (0.5, 8, 4)
    assert (results["graded"], results["passed"], results["failed"], results["pass_rate"]) == (6, 4, 2, 4 / 6)
    assert (results["skipped"], [each["count"] for each in results["skipped_reasons"].values()]) == (2, [2])
    assert results["reward_stats"]["pass_at_k"] == {"1": 0.5, "2": 0.5}
    assert client.page("eval")["eval_runs"][0]["results"] == results


def test_metrics_have_the_platforms_form(client):
    found = client.metrics("eval", "asked")
    assert found["overview"]["completed_samples"] == found["overview"]["total_samples"] == 8
    assert found["pass_at_k"] == [{"k": 1, "value": 0.5}, {"k": 2, "value": 0.5}]
    assert found["reward_stats"] == {"mean": 0.5, "median": 0.5, "std": 0.5, "min": 0.0, "max": 1.0}


def test_name_and_id_lead_to_the_same_run(client):
    by_name = client.info("eval", "asked")
    assert client.info("eval", by_name["eval_run"]["id"])["eval_run"] == by_name["eval_run"]
    assert refused(client.info, "train", "asked").code == "RUN_NOT_FOUND"


def test_files_have_the_announced_sizes(client):
    files = client.manifest("eval", "asked", "metrics,trajectories,artifacts,logs,report")
    contents = client.download("eval", "asked", files)
    rows = {f"trajectories/row_{row}_run_{place}.json" for row in range(4) for place in range(2)}
    notes = {f"artifacts/row_1_run_{place}/deep/note.txt" for place in range(2)}
    assert set(contents) == {"metrics.json", "summary.jsonl", "logs.txt", "report.html", *rows, *notes}
    answer = json.loads(contents["trajectories/row_3_run_0.json"])
    assert answer["end"] == "agent_error" and "a tool is broken" in answer["message"]
    assert json.loads(contents["trajectories/row_2_run_1.json"])["messages"][-1]["role"] == "assistant"
    assert contents["logs.txt"].splitlines()[3].endswith(b"ERROR   [step 7] two")


def test_no_secret_of_the_run_is_in_what_is_downloaded(client):
    contents = client.download("eval", "asked", client.manifest("eval", "asked", "metrics,trajectories,logs,report"))
    assert all(b"1 times 3?" not in content for content in contents.values())
    assert b'"content": "[redacted]"' in contents["trajectories/row_1_run_0.json"]
    assert client.info("eval", "asked")["resolved_secret_scopes"] == {"WORD": "user", "REMOVED": "user"}


def test_rows_choose_trajectories_and_their_summary(client):
    files = client.manifest("eval", "asked", "trajectories", rows="0,2-3")
    contents = client.download("eval", "asked", files)
    assert len(contents) == 7 and "trajectories/row_1_run_0.json" not in contents
    assert [json.loads(line)["row"] for line in contents["summary.jsonl"].splitlines()] == [0, 0, 2, 2, 3, 3]
    whole = client.manifest("eval", "asked", "trajectories")
    assert whole[0]["size"] > len(contents["summary.jsonl"])


def test_a_range_of_rows_costs_nothing_whatever_its_length(client, world):
    tracemalloc.start()
    try:
        files = client.manifest("eval", "asked", "trajectories", rows="2-99999999,0-3,1")
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert len(files) == 9


def test_rows_and_ranges_are_counted_before_they_are_read(client):
    assert client.manifest("eval", "asked", "trajectories", rows=",".join(["0"] * 1000))
    caught = refused(client.manifest, "eval", "asked", "trajectories", rows=",".join(["0"] * 1001))
    assert (caught.status, caught.code, "at most 1000" in caught.body["error"]) == (400, "QUERY_INVALID", True)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("eval-runs", {"run_config": {"tables": {"x": [0] * 20_000}}}, "more than 20000 JSON values"),
        ("eval-runs", {"run_config": {"tables": json.loads('{"a":' * 70 + "1" + "}" * 70)}}, "nested more than 64 levels"),
        ("datasets", {"file_name": "x" * 10_001, "extension": "csv", "file_size": 1}, "longer than 10000 characters"),
        ("eval-runs/asked/samples/download-urls", {"items": [{"path": "x"}] * 501}, "1 to 500 files"),
        ("eval-runs", {"snapshot": "x" * (4 << 20)}, "larger than 4194304 bytes"),
    ],
)
def test_every_part_of_a_body_is_bounded(client, path, body, words):
    caught = refused(client.ask, "POST", path, body)
    assert caught.status in (400, 413) and words in caught.body["error"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_ranges_hold_the_rows_that_they_name(ends):
    ranges = [range(min(pair), max(pair) + 1) for pair in ends]
    rows = RowRanges(ranges)
    assert [row in rows for row in range(40)] == [any(row in each for each in ranges) for row in range(40)]


def test_link_without_a_token_serves_the_current_file(client):
    asked = [{"path": "trajectories/row_2_run_0.json"}, {"path": "summary.jsonl"}]
    items = client.ask("POST", "eval-runs/asked/samples/download-urls", {"items": asked})["items"]
    assert [fetch(item["url"])[0] for item in items] == [200, 200]


@pytest.mark.parametrize(
    "item",
    [
        {"path": "../config.json"},
        {"path": "/etc/passwd"},
        {"path": "artifacts/row_1_run_0/passwords"},
        {"path": "artifacts/row_1_run_0/../../../config.json"},
        {"path": "metrics.json", "token": "../config.json"},
        {"path": "metrics.json", "token": ".."},
        {"path": "metrics.json", "token": "metrics-x/../../config.json"},
        {"path": "trajectories/row_9_run_0.json"},
        {"path": "nothing\x00here"},
        {"path": ""},
    ],
)
def test_paths_lead_nowhere_else(client, item):
    error = refused(client.ask, "POST", "eval-runs/asked/samples/download-urls", {"items": [item]})
    assert (error.status, error.code) == (404, "OUTPUT_NOT_FOUND")


@pytest.mark.parametrize(
    "items", [None, [], {}, [1], [{"path": 3}], [{"token": "x"}], [{"path": "a", "token": 1}], [{"path": "a"}] * 501]
)
def test_links_are_made_for_a_list_of_files_only(client, items):
    assert refused(client.ask, "POST", "eval-runs/asked/samples/download-urls", {"items": items}).code == "BODY_INVALID"


def test_a_link_is_good_for_its_own_file_and_time(world, client):
    (item,) = client.ask("POST", "eval-runs/asked/samples/download-urls", {"items": [{"path": "metrics.json"}]})["items"]
    assert fetch(item["url"])[0] == 200
    assert fetch(item["url"][:-1] + ("0" if item["url"][-1] != "0" else "1"))[0] == 403
    assert fetch(item["url"].replace("/output/", "/dataset/"))[0] == 403
    old = SignedLinks(world.controller.home.key("links"), world.url, lifetime_s=-1).create("output", run="x", file="y")
    status, body, _ = fetch(old)
    assert status == 403 and json.loads(body)["code"] == "LINK_EXPIRED"
    gone = SignedLinks(world.controller.home.key("links"), world.url).create("output", run="x", file="y")
    assert fetch(gone)[0] == 404


@pytest.mark.parametrize(
    "query", [{"types": "all"}, {"types": "checkpoints"}, {"types": "metrics", "rows": "x"}, {"types": "logs", "rows": "5-2"}]
)
def test_a_manifest_refuses_what_it_does_not_know(client, query):
    error = refused(client.ask, "GET", "eval-runs/asked/samples/manifest", **query)
    assert (error.status, error.code) == (400, "QUERY_INVALID") and error.body["field"] in query


def test_logs_are_walked_back_to_the_beginning(client):
    whole = client.logs("eval", "asked", limit=200)
    assert whole["next_cursor"] is None and len(whole["logs"]) == 11
    entries: list[Any] = []
    page = client.logs("eval", "asked", limit=3)
    while page["next_cursor"]:
        entries[:0] = page["logs"]
        page = client.logs("eval", "asked", limit=3, cursor=page["next_cursor"])
    assert [*page["logs"], *entries] == whole["logs"]


def test_logs_are_followed_from_the_beginning_on(client):
    whole = client.logs("eval", "asked", limit=200)["logs"]
    entries: list[Any] = []
    page = client.logs("eval", "asked", limit=4, direction="newer")
    while page["logs"]:
        entries += page["logs"]
        page = client.logs("eval", "asked", limit=4, direction="newer", cursor=page["next_cursor"])
    assert entries == whole and page["next_cursor"] is not None


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 201}, {"limit": "x"}, {"direction": "up"}, {"cursor": "!"}, {"cursor": "YWJjOjEy"}]
)
def test_a_log_refuses_other_pages(client, query):
    error = refused(client.logs, "eval", "asked", **query)
    assert (error.status, error.body["field"]) == (400, next(iter(query)))


def test_pages_walk_all_runs_newest_first(world, client):
    other = world.controller.runs
    submission = other.get("eval", "asked").submission
    for number in range(5):
        run = other.add("train", f"{number:016x}", f"listed-{number}", submission)
        other.request_stop(run.id)
    assert [row["name"] for row in client.every("train", limit=2)] == [f"listed-{number}" for number in (4, 3, 2, 1, 0)]
    last = client.page("train", limit=5)
    assert (last["total_count"], last["has_more"], last["next_offset"]) == (5, False, None)
    beyond = client.page("train", offset=99)
    assert beyond["training_runs"] == [] and beyond["next_offset"] is None
    row = last["training_runs"][0]
    assert row["model"]["model_name"] == row["model"]["name"] == "tiny" and row["dataset"]["file_name"] == "tasks.jsonl"


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 51}, {"limit": "x"}, {"limit": "+1"}, {"limit": ""}, {"offset": -1}, {"offset": "1e3"}]
)
def test_a_page_outside_the_bounds_is_refused(client, query):
    error = refused(client.page, "eval", **query)
    assert (error.status, error.code, error.body["field"]) == (400, "QUERY_INVALID", next(iter(query)))


@pytest.mark.parametrize("ref", ["nobody", "a/b", "../verify", "%2e%2e", "asked/stop", "' OR 1=1 --", "é", "x" * 500])
def test_whatever_a_reference_says_it_names_a_run_or_nothing(client, ref):
    assert refused(client.info, "eval", ref).code == "RUN_NOT_FOUND"
    assert refused(client.stop, "eval", ref).status == 404


def test_bodies_that_are_no_objects_are_refused(client):
    for body in (b"{", b"[]", b"\xff", b'"x"'):
        assert refused(client.send, "POST", "/api/cli/eval-runs", body).code == "BODY_INVALID"
    error = refused(client.send, "POST", "/api/cli/eval-runs", b" " * (5 << 20))
    assert (error.status, error.code) == (413, "BODY_TOO_LARGE")


def test_unknown_routes_and_methods_have_error_bodies(client):
    assert (refused(client.ask, "GET", "nothing").status, refused(client.ask, "GET", "nothing").code) == (404, "ROUTE_UNKNOWN")
    assert refused(client.ask, "DELETE", "eval-runs").status == 405
    assert refused(client.ask, "GET", "eval-runs/").status == 404


def test_submission_problems_are_reported_together(world, client):
    before = sorted(world.controller.home.runs.iterdir())
    digest = upload(client, archive(project()))
    error = refused(client.submit, "eval", own_run(digest, eval={"samples": 0, "kk": 1}, run={"name": "no/name"}))
    assert (error.status, error.code) == (400, "CONFIG_INVALID")
    assert {issue["key"] for issue in error.body["issues"]} == {"eval.samples", "eval.kk", "run.name"}
    assert sorted(world.controller.home.runs.iterdir()) == before


def test_code_must_be_known_by_its_digest(client):
    unknown = refused(client.submit, "eval", own_run("0" * 64))
    assert (unknown.status, unknown.code) == (404, "SNAPSHOT_UNKNOWN")
    assert refused(client.submit, "eval", own_run("../../token")).code == "SNAPSHOT_INVALID"
    content = archive({"a": "1"})
    wrong = refused(client.send, "PUT", f"/api/cli/snapshots/{'1' * 64}", content)
    assert wrong.code == "SNAPSHOT_MISMATCH"
    target = f"/api/cli/snapshots/{sha256(content).hexdigest()}"
    assert [exchange(client.url, "PUT", target, content, client.headers())[0] for _ in range(2)] == [201, 200]
    assert refused(replace(client, git="local/none").submit, "eval", {"experiment_config": {}}).code == "CODE_MISSING"


@pytest.mark.parametrize("path", ["datasets", "eval-runs", "training-runs", "rollouts", "models/base", "environment-secrets"])
def test_a_request_names_its_repository_as_the_contract_says(client, path):
    for git, code in ((None, "GIT_SCOPE_HEADER_REQUIRED"), ("no repository", "GIT_SCOPE_HEADER_INVALID")):
        answer = refused(replace(client, git=git).ask, "GET", path)
        assert (answer.status, answer.code, answer.body["field"]) == (400, code, "x-osmosis-git")
    assert replace(client, git=None).ask("GET", "verify")["user"]
    assert refused(client.submit, "eval", {"experiment_config": {}}).code == "REPOSITORY_UNKNOWN"


def test_a_full_queue_refuses_one_more(tmp_path):
    with served(tmp_path / "home", queued=0) as found:
        client = found.client()
        error = refused(client.submit, "eval", own_run(upload(client, archive(project()))))
        assert (error.status, error.code) == (429, "QUEUE_FULL")


def test_snapshots_have_a_limit_and_leave_nothing_behind(tmp_path):
    with served(tmp_path / "home", snapshot_mb=1) as found:
        content = b"x" * 1_000_001
        error = refused(found.client().send, "PUT", f"/api/cli/snapshots/{sha256(content).hexdigest()}", content)
        assert error.status == 413
        assert list(Path(found.controller.home.snapshots).iterdir()) == []


def test_many_ask_at_once_and_all_are_answered(client):
    start = threading.Barrier(16)

    def ask(number: int) -> int:
        start.wait(30)
        return len(client.manifest("eval", "asked", "metrics,trajectories"))

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(16))) == {10}
