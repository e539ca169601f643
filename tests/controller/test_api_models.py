"""Models over HTTP: what there is, and a checkpoint that is deployed, asked and taken back."""

import asyncio
from urllib.parse import quote

import pytest
from served_controller import add_training, served_controller
from test_deployments import save_checkpoint

from penstock.models import resolve

NAME = quote("sums/step-4", safe="")


def test_models_and_checkpoints_are_listed(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            _, results = add_training(caller.controller.runs, caller.controller.home, "sums")
            for number, step in ((1, 2), (2, 4)):
                save_checkpoint(results, resolve("tiny").path, number, step=step)
            (results / "metrics.jsonl").write_text('{"step": 4, "reward": 0.5}\n{"step": 5, "rew')
            base = (await caller.ask("GET", "models/base"))[1]
            assert {"tiny", "smollm2-135m"} <= {each["model_name"] for each in base["models"]}
            page = (await caller.ask("GET", "models/lora?limit=1"))[1]
            assert (page["total_count"], page["next_offset"]) == (2, 1)
            assert (page["active_deployments"], page["max_active_deployments"]) == (0, 2)
            (newest,) = page["models"]
            assert (newest["id"], newest["checkpoint_step"], newest["reward"]) == ("sums/step-4", 4, 0.5)
            assert (newest["base_model"], newest["training_run_name"], newest["deployment_status"]) == ("tiny", "sums", None)
            shown = (await caller.ask("GET", f"models/{NAME}"))[1]
            assert shown["id"] == "sums/step-4" and shown["inference_model"] is None

    asyncio.run(whole())


@pytest.mark.slow
def test_a_checkpoint_is_deployed_answers_and_is_taken_back(tmp_path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            _, results = add_training(caller.controller.runs, caller.controller.home, "sums")
            save_checkpoint(results, resolve("tiny").path, 1, step=4)
            for _ in range(2):
                status, done = await caller.ask("POST", f"models/{NAME}/deploy", {})
                assert (status, done["id"], done["status"]) == (200, "sums/step-4", "active")
            shown = (await caller.ask("GET", "models/sums"))[1]
            assert (shown["deployment_status"], shown["deployed_by"], shown["inference_model"]) == (
                "active",
                "owner",
                "sums/step-4",
            )
            body = {"model": shown["inference_model"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            url, token = f"{shown['inference_url']}/chat/completions", f"Bearer {shown['inference_token']}"
            status, answer = await caller.ask("POST", url, body, token=False, authorization=token)
            assert status == 200 and answer["model"] == "sums/step-4" and answer["choices"]
            for _ in range(2):
                assert (await caller.ask("POST", "models/sums/undeploy", {}))[1]["status"] == "inactive"
            assert (await caller.ask("GET", f"models/{NAME}"))[1]["deployment_status"] is None

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "models/none"), ("POST", "models/none/deploy"), ("POST", "models/none/undeploy")]
)
def test_an_unknown_model_is_not_found(tmp_path, method, path):
    async def whole():
        async with served_controller(tmp_path) as caller:
            status, refused = await caller.ask(method, path, None if method == "GET" else {})
            assert (status, refused["code"]) == (404, "MODEL_NOT_FOUND")

    asyncio.run(whole())
