"""From a submission to the last file, over the platform's API: runs of a registered repository that really are carried out."""

import json
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from api_cases import ENGINE_FOLDER, Served, archive, ended, own_run, project, repository, served, until, upload
from api_client import Refused

pytestmark = pytest.mark.slow
MULTIPLY = Path(__file__).parents[2] / "examples" / "multiply"
EXPERIMENT = {"rollout": "multiply", "entrypoint": "agent.py", "model_path": "tiny", "dataset": "tiny"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """A controller that knows the repository acme/agents and the dataset `tiny`."""
    rollout = {f"rollouts/multiply/{name}": (MULTIPLY / name).read_text() for name in ("agent.py",)}
    kept = {f"{folder}/.gitkeep": "" for folder in ("configs/eval", "configs/training", "data")}
    code = repository(tmp_path_factory.mktemp("code"), rollout | kept)
    tasks = tmp_path_factory.mktemp("tasks") / "tiny.jsonl"
    tasks.write_text("".join((MULTIPLY / "tiny_tasks.jsonl").read_text().splitlines(keepends=True)[:8]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ENGINE_FOLDER))
        with served(tmp_path_factory.mktemp("home"), runs=2) as found:
            found.client().ask("POST", "repositories", {"name": "acme/agents", "path": str(code)})
            found.controller.datasets.add_file(tasks, "tiny")
            yield found


def test_contract_client_runs_both_kinds(world):
    client = world.client()
    evaluation = {"experiment_config": EXPERIMENT, "evaluation_config": {"n": 2, "limit": 3}}
    training = {
        "experiment_config": EXPERIMENT | {"branch": "main"},
        "training_config": {"n_samples_per_prompt": 4, "rollout_batch_size": 8, "lr": 6e-4, "total_epochs": 1},
        "env_config": {"COLOUR": "blue"},
    }
    tried, trained = client.submit("eval", evaluation), client.submit("train", training)
    assert tried["status"] == trained["status"] == "pending"
    detail = ended(client, "eval", tried["id"])
    assert detail["eval_run"]["status"] == "finished", client.logs("eval", tried["id"])
    assert (detail["results"]["total_runs"], detail["results"]["sampled_rows"], detail["config"]["n"]) == (6, 3, 2)
    assert len(detail["commit_sha"]) == 40 and detail["repository"] == "acme/agents"
    files = client.manifest("eval", tried["id"], "metrics,trajectories,logs,report")
    assert len(client.download("eval", tried["id"], files)) == 10

    detail = ended(client, "train", trained["id"])
    assert detail["training_run"]["status"] == "finished", client.logs("train", trained["id"])
    assert detail["env_config"] == {"COLOUR": "blue"} and detail["branch"] == "main"
    steps = detail["training_run"]["total_steps"]
    assert detail["training_run"]["current_step"] == steps and client.page("train")["training_runs"][0]["total_steps"] == steps
    metrics = client.metrics("train", trained["id"])
    curves = {metric["metric_key"]: metric["data_points"] for metric in metrics["metrics"]}
    assert [point["step"] for point in curves["rollout/raw_reward"]] == list(range(1, steps + 1))
    assert {"train/entropy_loss", "rollout/response_lengths"} <= set(curves)
    assert all(point["timestamp"] > 1.6e12 for points in curves.values() for point in points)
    assert {each["key"] for each in metrics["overview"]["metric_summaries"]} == set(curves)
    (*_, last) = client.checkpoints(trained["id"])
    assert last["checkpoint_step"] == steps
    files = client.manifest("train", trained["id"], "metrics,logs,report,checkpoints")
    contents = client.download("train", trained["id"], files)
    assert f"checkpoints/step-{steps}/model.safetensors" in contents
    assert json.loads(contents["metrics.json"])["training_run_id"] == trained["id"]


def test_stopped_evaluation_keeps_its_results(world):
    client = world.client()
    files = project() | {"tasks.jsonl": '{"prompt": "stall", "metadata": {"n": 0}}\n{"prompt": "go", "metadata": {"n": 2}}\n'}
    client.submit("eval", own_run(upload(client, archive(files))) | {"name": "stalled"})
    until(lambda: (client.info("eval", "stalled")["results"] or {}).get("total_runs") == 2)
    running = client.manifest("eval", "stalled", "metrics,trajectories,logs")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: client.stop("eval", "stalled"), range(2)))
    detail = ended(client, "eval", "stalled")
    assert detail["eval_run"]["status"] == "stopped" and detail["results"]["total_runs"] == 2
    assert detail["results"]["sampled_rows"] * detail["config"]["n"] == 4
    assert len(client.download("eval", "stalled", running)) == 5, "files listed during the run are still there"
    with pytest.raises(Refused) as caught:
        client.stop("eval", "stalled")
    assert (caught.value.status, caught.value.code) == (409, "RUN_OVER")


def test_missing_commit_or_secret_refuses_the_submission(world):
    client = world.client()
    with pytest.raises(Refused) as caught:
        client.submit("eval", {"experiment_config": EXPERIMENT | {"commit_sha": "0123abcd"}})
    assert caught.value.status == 404
    with pytest.raises(Refused) as caught:
        client.submit("eval", {"experiment_config": EXPERIMENT, "secrets": {"required": ["API_KEY", "OTHER"]}})
    assert (caught.value.status, caught.value.body["error"]) == (404, "Secret(s) not found: API_KEY, OTHER")
    with pytest.raises(Refused) as caught:
        client.submit("train", {"experiment_config": EXPERIMENT, "training_config": {"lr": "fast", "epochs": 1}})
    assert {issue["key"] for issue in caught.value.body["issues"]} == {"training.lr", "training.epochs"}
