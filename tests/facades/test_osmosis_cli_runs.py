"""The seeds' own workflow, submitted with `osmosis eval submit` and `osmosis train submit`, carried out and looked at."""

import json
import shlex
import time
from pathlib import Path

import pytest
from osmosis_shell import DEADLINE_S, Shell, make_workspace, serving
from seed_blocks import FOLDER, read_seed

G = {"git", "workspace_directory"}
PAGE = {"schema_version", "items", "total_count", "has_more", "next_offset"}
SEED = read_seed("002")
ROWS = 4
EXPERIMENT = '[experiment]\nrollout = "multiply"\nentrypoint = "main.py"\nmodel_path = "tiny"\ndataset = "products"\n'
EVAL = f'{EXPERIMENT}[evaluation]\nn = 2\nbatch_size = 8\n[secrets]\nrequired = ["A_WORD"]\n[env]\nPLAIN = "yes"\n'
TRAIN = f"""{EXPERIMENT}[training]
lr = 1e-4
n_samples_per_prompt = 4
rollout_batch_size = 4
max_response_length = 30
[checkpoints]
checkpoint_save_freq = 1
"""
SUMMARY = {"avg_reward", "pass_rate", "graded", "passed", "failed", "skipped", "progress"}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SEED, reason=f"no seed documents in {FOLDER}; set PENSTOCK_SEEDS")]


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home")) as environment:
        yield environment


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Not in git, without a remote: a folder."""
    folder = make_workspace(tmp_path_factory.mktemp("workspace") / "agents")
    (folder / "rollouts" / "multiply").mkdir()
    (folder / "rollouts" / "multiply" / "main.py").write_text(SEED[1].code)
    (folder / "configs" / "eval" / "multiply.toml").write_text(EVAL)
    (folder / "configs" / "training" / "multiply.toml").write_text(TRAIN)
    rows = [{"system_prompt": "Be brief.", "user_prompt": f"{a}*7", "ground_truth": str(a * 7)} for a in range(2, 2 + ROWS)]
    (folder / "data" / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def osmosis(capsys, monkeypatch, controller, workspace):
    for name, value in controller.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(workspace)
    return Shell(capsys)


submitted: dict[str, dict] = {}


def over(osmosis, kind, name):
    """The run's detail once it has ended."""
    deadline = time.monotonic() + DEADLINE_S
    word = "eval_run" if kind == "eval" else "training_run"
    while time.monotonic() < deadline:
        data = osmosis.json(kind, "info", name).reported["data"]
        if data[word]["status"] in ("finished", "failed", "stopped"):
            return data
        time.sleep(0.2)
    raise AssertionError(f"{name} does not end: {data[word]}")


def said(osmosis, kind, name):
    return [line["message"] for line in osmosis.json(kind, "logs", name, "--limit", 200).reported["items"]]


@pytest.fixture
def evaluation(osmosis, workspace, monkeypatch):
    """One evaluation for all tests that look at it."""
    if "eval" not in submitted:
        monkeypatch.setenv("THE_WORD", "hush-hush-hush")
        assert osmosis.json("secret", "set", "A_WORD", "--env", "THE_WORD").code == 0
        command, *arguments = shlex.split(SEED[8].code.replace("<rollout-name>", "multiply"))
        assert command == "osmosis"
        submitted["eval"] = osmosis.json(*arguments, "-y").reported
    return submitted["eval"]["resource"]


def test_evaluation_of_the_seeds_workflow_runs_to_its_end(osmosis, evaluation):
    answer = submitted["eval"]
    assert list(answer) == ["schema_version", "status", "operation", "resource", "message", "next_steps_structured"]
    assert (answer["operation"], answer["status"], evaluation["model_name"], evaluation["dataset_name"]) == (
        "eval.submit",
        "success",
        "tiny",
        "products",
    )
    assert {"id", "name", "status", "model_name", "dataset_name", "created_at", "config", *G} == set(evaluation) - {"url"}
    assert set(evaluation["config"]) == {"rollout", "entrypoint", "model", "dataset", "branch", "commit_sha"}
    assert answer["next_steps_structured"][:2] == [{"action": "eval_info", "name": evaluation["name"]}, {"action": "eval_list"}]
    assert evaluation["git"] == {"identity": "local/agents", "remote_url": None}
    data = over(osmosis, "eval", evaluation["name"])
    assert data["eval_run"]["status"] == "finished", said(osmosis, "eval", evaluation["name"])[-20:]
    assert set(data["summary"]) >= SUMMARY and data["summary"]["progress"] == {"completed": 8, "total": 8, "unit": "samples"}
    assert (
        data["summary"]["graded"] + data["summary"]["skipped"] == 8 and data["metrics_available"] and data["metrics_error"] is None
    )
    assert {"eval_run", "summary"} == set(data["metrics"]) and data["metrics"]["summary"]["completed_samples"] == 8
    assert [one["k"] for one in data["metrics"]["summary"]["pass_at_k"]] == [1, 2]
    assert (data["model"]["name"], data["env_config"], data["resolved_secret_scopes"]) == (
        "tiny",
        {"PLAIN": "yes"},
        {"A_WORD": "user"},
    )
    assert data["output_path"] is None


def test_evaluation_is_listed_and_shown_in_each_form(osmosis, evaluation):
    over(osmosis, "eval", evaluation["name"])
    answer = osmosis.json("eval", "list").reported
    assert set(answer) == PAGE | G
    (item,) = [one for one in answer["items"] if one["id"] == evaluation["id"]]
    assert (item["model"], item["dataset"], item["rollout"]) == ("tiny", "products", "multiply") and set(item["summary"]) >= SUMMARY
    (line,) = [line for line in osmosis("eval", "list", "--plain").out.splitlines() if line.startswith(evaluation["name"] + "\t")]
    assert line.split("\t")[1:3] == ["[finished]", "multiply"]
    labels = [line.partition(":")[0] for line in osmosis("eval", "info", evaluation["name"], "--plain").out.splitlines()]
    wanted = [
        "Name",
        "Status",
        "Progress",
        "Duration",
        "Pass Rate",
        "Submitted",
        "Dataset",
        "Model",
        "Rollout",
        "Entrypoint",
        "Results",
    ]
    assert [label for label in labels if label in wanted] == wanted


def test_for_people_the_metrics_of_an_evaluation_are_saved(osmosis, evaluation, workspace, tmp_path):
    over(osmosis, "eval", evaluation["name"])
    shown = osmosis("eval", "info", evaluation["name"])
    saved = workspace / ".osmosis" / "evals" / evaluation["name"] / "metrics.json"
    assert shown.code == 0 and str(saved) in shown.out and json.loads(saved.read_text())
    data = osmosis.json("eval", "info", evaluation["name"], "-o", tmp_path / "there").reported["data"]
    assert (
        data["output_path"] == str(tmp_path / "there" / "metrics.json")
        and Path(data["output_path"]).read_bytes() == saved.read_bytes()
    )


def test_what_an_evaluation_said_leads_back_to_its_beginning(osmosis, evaluation):
    over(osmosis, "eval", evaluation["name"])
    last = osmosis.json("eval", "logs", evaluation["name"], "--limit", 1).reported
    assert (last["total_count"], last["has_more"]) == (1, last["next_cursor"] is not None)
    lines, cursor = [last["items"][0]["message"]], last["next_cursor"]
    while cursor:
        page = osmosis.json("eval", "logs", evaluation["name"], "--limit", 200, "--cursor", cursor).reported
        lines, cursor = [*(item["message"] for item in page["items"]), *lines], page["next_cursor"]
    assert lines == said(osmosis, "eval", evaluation["name"]) and not any("hush" in line for line in lines)


def test_what_an_evaluation_left_is_fetched_once(osmosis, evaluation, workspace, tmp_path):
    over(osmosis, "eval", evaluation["name"])
    answer = osmosis.json("eval", "download", evaluation["name"], "--type", "all", "-o", tmp_path).reported
    resource = answer["resource"]
    assert (answer["operation"], answer["status"], resource["status"]) == ("eval.download", "success", "success")
    assert resource["selected_types"] == ["metrics", "trajectories", "artifacts", "logs"] and resource["files_failed"] == []
    assert resource["files_downloaded"] == resource["total_files"] and resource["bytes_downloaded"] == resource["total_bytes"]
    runs = {f"row_{row}_run_{run}.json" for row in range(ROWS) for run in range(2)}
    assert {path.name for path in (tmp_path / "trajectories").iterdir()} == runs
    assert (tmp_path / "logs.txt").read_text() and len((tmp_path / "summary.jsonl").read_text().splitlines()) == 8
    assert not any("hush" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    again = osmosis.json("eval", "download", evaluation["name"], "--type", "all", "-o", tmp_path).reported["resource"]
    assert (again["files_downloaded"], again["files_skipped"]) == (0, resource["total_files"])


def test_rows_are_chosen_and_files_lie_in_the_workspace(osmosis, evaluation, workspace):
    over(osmosis, "eval", evaluation["name"])
    resource = osmosis.json("eval", "download", evaluation["name"], "--rows", "1,3").reported["resource"]
    folder = workspace / ".osmosis" / "evals" / evaluation["name"]
    assert (resource["output_path"], resource["rows"], resource["selected_types"]) == (
        str(folder),
        "1,3",
        ["metrics", "trajectories"],
    )
    names = {path.name for path in (folder / "trajectories").iterdir()}
    assert names == {f"row_{row}_run_{run}.json" for row in (1, 3) for run in range(2)}


def test_run_that_is_over_cannot_be_stopped(osmosis, evaluation):
    over(osmosis, "eval", evaluation["name"])
    assert osmosis.json("eval", "stop", evaluation["name"], "-y").error["code"] == "CONFLICT"


def test_training_run_of_the_seed_workflow(osmosis, evaluation, tmp_path):
    answer = osmosis.json("train", "submit", "configs/training/multiply.toml", "-y").reported
    name = answer["resource"]["name"]
    assert (answer["operation"], answer["next_steps_structured"][0]) == ("train.submit", {"action": "train_info", "name": name})
    stop_one_that_waits(osmosis)
    data = over(osmosis, "train", name)
    assert data["training_run"]["status"] == "finished", said(osmosis, "train", name)[-20:]
    assert data["summary"]["progress"] == {"completed": 1, "total": 1, "unit": "steps"} and not data["in_progress"]
    assert [one["checkpoint_step"] for one in data["checkpoints"]] and data["metrics_available"]
    assert {"training_run", "summary", "metrics"} == set(data["metrics"]) and "training_reward" in data["metrics"]["summary"]
    assert (data["training_run"]["model_name"], data["training_run"]["dataset_name"]) == ("tiny", "products")
    saved = osmosis.json("train", "info", name, "-o", f"{tmp_path}/").reported["data"]["output_path"]
    assert Path(saved).parent == tmp_path and json.loads(Path(saved).read_text()) == data["metrics"]
    (item,) = osmosis.json("train", "list").reported["items"]
    assert item["name"] == name and item["summary"]["progress"]["total"] == 1
    assert f"{name}\t[finished]\ttiny\tmultiply\t" in osmosis("train", "list", "--plain").out
    trained = osmosis.json("model", "list", "--type", "lora").reported["items"]
    assert {one["training_run_name"] for one in trained} == {name}
    serve_and_put_away(osmosis, trained[0]["model_name"])


def serve_and_put_away(osmosis, model):
    """A model that was trained."""
    served = osmosis.json("model", "deploy", model).reported
    assert (served["operation"], served["resource"]["model_name"], served["resource"]["status"]) == (
        "model.deploy",
        model,
        "active",
    )
    assert served["next_steps_structured"] == [{"action": "model_info", "name": model}] and set(served["resource"]) >= G
    data = osmosis.json("model", "info", model).reported["data"]["lora_model"]
    assert {"hf_upload_status", "hf_url", "uploaded_by", "training_run_name"} <= set(data)
    assert (data["deployment_status"], bool(data["inference_model"])) == ("active", True)
    away = osmosis.json("model", "undeploy", model).reported
    assert (away["operation"], away["resource"]["status"]) == ("model.undeploy", "inactive")


def stop_one_that_waits(osmosis):
    """An evaluation behind the training run."""
    name = osmosis.json("eval", "submit", "configs/eval/multiply.toml", "-y").reported["resource"]["name"]
    assert osmosis.json("eval", "info", name).reported["data"]["eval_run"]["status"] == "pending"
    assert osmosis.json("eval", "download", name).error["code"] == "VALIDATION"
    answer = osmosis.json("eval", "stop", name, "-y").reported
    assert (answer["operation"], answer["resource"]["name"]) == ("eval.stop", name) and set(answer["resource"]) == {"name", *G}
    assert over(osmosis, "eval", name)["eval_run"]["status"] == "stopped"
