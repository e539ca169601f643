"""Several policies in one run: each learns its own part, a frozen one stays as it is, and other endpoints are never trained."""

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from cli_cases import called
from judge_double import Answer, judge_double

from penstock.config import RunConfig, load_config
from penstock.engines.checkpoint_files import refuse_damaged_weights
from penstock.errors import ConfigError, ModelError
from penstock.models import find_cached
from penstock.pool import POOLS
from penstock.records import Group
from penstock.run.inputs import read_inputs, refuse_untrainable
from penstock.run.recorded_run import open_recorded_run
from penstock.train.trainer import train
from penstock.train.verify import verify
from penstock.view.export import write_report

TEAM = Path(__file__).parents[3] / "examples" / "team" / "train.toml"


def silent(*_: Any) -> None:
    """Nobody watches."""


def run_team(folder: Path, *settings: str, config: Path = TEAM) -> RunConfig:
    """Train the example with these settings, without its evaluations unless asked for."""
    made = load_config(config, [f'run.folder="{folder}"', "dataset.eval_limit=1", *settings])

    async def training() -> None:
        await train(made, read_inputs(made, silent), listener=silent, stop=asyncio.Event())

    asyncio.run(training())
    return made


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "team" / "metrics.jsonl").read_text().splitlines()]


def recorded(folder: Path) -> list[Group]:
    async def read() -> list[Group]:
        pool = POOLS.load("sqlite")(folder / "team")
        try:
            return await pool.groups("train")
        finally:
            await pool.close()

    return asyncio.run(read())


def audit(folder: Path) -> Any:
    async def check() -> Any:
        async with open_recorded_run(folder / "team", channel="train") as run:
            return await verify(run, silent)

    return asyncio.run(check())


def streamed(text: str) -> Answer:
    """The answer of an OpenAI-compatible endpoint, as one event."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, {"content-type": "text/event-stream"}, f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"


def newest(folder: Path) -> Path:
    return max((folder / "team" / "checkpoints").glob("[0-9]*"))


def evaluated(folder: Path, checkpoint: Path) -> float:
    """The mean reward of 32 rollouts with the policies of a checkpoint."""
    settings = [f'run.folder="{folder}"', f'model.name="{checkpoint}"', "eval.samples=4"]
    given = [part for setting in settings for part in ("--set", setting)]
    done = called(folder, "eval", "run", TEAM, "--json", *given)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)["outcome"]["reward"]["value"]


@pytest.mark.slow
def test_planner_and_executor_with_adapters_both_improve(tmp_path: Path) -> None:
    run_team(tmp_path, "train.steps=12")
    entries = [entry["policies"] for entry in metrics(tmp_path)]
    for policy in ("planner", "executor"):
        rewards = [entry[policy]["reward"] for entry in entries]
        print(f"{policy}: {[round(reward, 2) for reward in rewards]}")
        assert fmean(rewards[:2]) < 0.6
        assert fmean(rewards[-4:]) >= 0.8
    assert [entry["executor"]["lr"] for entry in entries] == [2e-3] * 12
    adapters = {name: (newest(tmp_path) / name / "adapter_model.safetensors").read_bytes() for name in ("planner", "executor")}
    assert adapters["planner"] != adapters["executor"]
    checked = audit(tmp_path)
    assert (checked.status, checked.exact_token_rate) == ("exact", 1.0)
    assert evaluated(tmp_path, newest(tmp_path)) >= 0.6
    assert "executor" in write_report(tmp_path / "team").read_text()


@pytest.mark.slow
def test_frozen_planner_keeps_its_weights_while_executor_is_trained(tmp_path: Path) -> None:
    run_team(tmp_path, "train.steps=3", "train.checkpoint_every=1", "train.checkpoints_kept=9", "policies.planner.frozen=true")
    assert sorted(path.name for path in newest(tmp_path).iterdir()) == ["executor", "state.json"]
    last = metrics(tmp_path)[-1]
    assert (last["version"], last["groups_stale"]) == (3, 0)
    assert last["policies"]["executor"]["updates"] == 3
    assert last["policies"]["planner"]["frozen"] and "updates" not in last["policies"]["planner"]
    checked = audit(tmp_path)  # recomputes the planner's tokens of every version with the start policy
    assert (checked.status, checked.gone_tokens) == ("exact", 0)
    assert set(checked.recomputed) == {0, 1, 2}
    refuse_damaged_weights(newest(tmp_path) / "executor")
    with (newest(tmp_path) / "executor" / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(ModelError, match=r"executor/adapter_model\.safetensors"):
        refuse_damaged_weights(newest(tmp_path) / "executor")
    steps = [step for group in recorded(tmp_path) for attempt in group.rollouts for step in attempt.steps]
    assert {version for step in steps if step.policy == "planner" for version in step.versions} == {0, 1, 2}


ASK_OTHERS = """
        said = await client.chat.completions.create(model="user", messages=[{"role": "user", "content": "Ask"}])
        assert said.choices[0].message.content == "please"
        await client.chat.completions.create(model="twin", messages=ctx.prompt)
"""


@pytest.mark.slow
def test_frozen_policies_have_models_and_endpoints_and_are_never_trained(tmp_path: Path) -> None:
    text = TEAM.read_text().replace('"../multiply/', f'"{TEAM.parent.parent}/multiply/')
    (tmp_path / "train.toml").write_text(text)
    first = "        messages, tools ="
    (tmp_path / "team.py").write_text((TEAM.parent / "team.py").read_text().replace(first, ASK_OTHERS.lstrip("\n") + first))
    with judge_double(lambda number, body: streamed("please")) as double:
        user = [f'policies.user={{frozen=true,model="m",engine={{name="openai",url="{double.url}"}}}}']
        twin = ['policies.twin={frozen=true,model="tiny"}']
        run_team(tmp_path, "train.steps=2", *user, *twin, config=tmp_path / "train.toml")
    assert {body["model"] for body in double.asked} == {"m"}
    steps = [step for group in recorded(tmp_path) for attempt in group.rollouts for step in attempt.steps]
    reported = {step.policy: step for step in steps}
    assert sorted(reported) == ["executor", "planner", "twin", "user"]
    assert not reported["user"].completion_ids and reported["user"].usage is not None
    assert {version for step in steps if step.policy == "twin" for version in step.versions} == {0, 1}
    entry = metrics(tmp_path)[-1]
    assert (entry["version"], entry["groups_stale"]) == (2, 0)
    trained = sum(entry["policies"][name]["trained_tokens"] for name in ("planner", "executor"))
    assert entry["trained_tokens"] == trained
    assert sorted(path.name for path in newest(tmp_path).iterdir()) == ["executor", "planner", "state.json"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.method=full", "train.lr=1e-4"], 'set train.method = "lora"'),
        (["policies.planner.frozen=true", "policies.executor={frozen=true}"], "there is nothing to train"),
        (["scale.name=ray"], "trains one policy"),
        (["model.name=CHECKPOINT"], "a checkpoint of several policies, which can be evaluated"),
    ],
)
def test_policies_that_cannot_be_trained_are_refused(tmp_path: Path, settings: list[str], said: str) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=said):
        refuse_untrainable(load_config(TEAM, [setting.replace("CHECKPOINT", f'"{tmp_path}"') for setting in settings]))


def test_checkpoint_of_several_policies_is_no_model_automatically(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapters"):
        find_cached(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['policies.j={frozen=true,model="no/such/folder"}'], "no/such/folder"),
        (['policies.j={frozen=true,engine={name="opnai"}}'], "opnai"),
        (['policies.j={frozen=true,engine={name="openai",url="http://h/v1"}}'], "policies.j.model is missing"),
        (
            ['engine={name="vllm",url=["http://h"]}', 'policies.j={frozen=true,model="tiny"}'],
            r"say with \[policies.j.engine\] where this model is served",
        ),
    ],
)
def test_what_cannot_serve_policy_is_rejected_before_anything_is_loaded(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_inputs(load_config(TEAM, settings), silent)
