"""Two policies on a real vLLM server, each an adapter with a name for every version, and the base model as a frozen third."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_server import HOME, vllm_server

from penstock.config import load_config
from penstock.models.pull import resolve
from penstock.records import Step
from penstock.run.inputs import read_inputs
from penstock.run.recorded_run import open_recorded_run
from penstock.train.trainer import train
from penstock.train.verify import Audit, verify

TEAM = Path(__file__).parents[1] / "faults" / "killed_run" / "team.py"
CLOSE = 1e-3
"""Of two float32 implementations of one model; another version of an adapter differs by more."""
LORA = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "16")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(not HOME, reason="$PENSTOCK_VLLM is not set")]

CONFIG = """
[run]
name = "team"
folder = "{folder}"
[model]
name = "smollm2-135m"
[agent]
entry = "{agent}"
[dataset]
train = "tasks.jsonl"
[rollout]
group_size = 4
groups_per_step = 2
[sampling]
max_tokens = 12
[engine]
name = "vllm"
url = ["{server}"]
[train]
method = "lora"
rank = 8
steps = 3
lr = 1e-3
checkpoints_kept = 9
[policies.planner]
[policies.executor]
lr = 2e-3
[policies.judge]
frozen = true
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, model = tmp_path_factory.mktemp("vllm"), resolve("smollm2-135m").path
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllm_server(model, folder, mode="processed_logprobs", context=2304, arguments=LORA, **environment) as url:
        yield url


def test_two_policies_are_trained_and_every_token_is_that_adapter(server: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"Write a short poem about {about}.", "label": ""} for about in ("rain", "snow", "wind", "fog")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "team.toml").write_text(CONFIG.format(folder=tmp_path, agent=TEAM, server=server))
    config = load_config(tmp_path / "team.toml")
    summary = asyncio.run(train(config, read_inputs(config, silent), listener=silent, stop=asyncio.Event()))
    assert (summary.steps, summary.exact_token_rate) == (3, 1.0)

    async def read() -> tuple[Audit, list[Step]]:
        async with open_recorded_run(tmp_path / "team", channel="train") as recorded:
            audit = await verify(recorded, silent, tolerance=CLOSE)
            groups = [group async for page in recorded.pages() for group in page]
        return audit, [step for group in groups for attempt in group.rollouts for step in attempt.steps]

    audit, steps = asyncio.run(read())
    # the log-probability of every token, as vLLM gave it, is that under its own policy's adapter of its version
    assert (set(audit.recomputed), audit.gone_tokens, audit.findings) == ({0, 1, 2}, 0, {})
    for policy in ("planner", "executor", "judge"):
        assert {version for step in steps if step.policy == policy for version in step.versions} == {0, 1, 2}
    last = json.loads((tmp_path / "team" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["version"], last["groups_stale"]) == (3, 0)
    assert {name: policy.get("updates") for name, policy in last["policies"].items()} == {
        "planner": 3,
        "executor": 3,
        "judge": None,
    }


def silent(*_: Any) -> None:
    """Nobody watches."""
