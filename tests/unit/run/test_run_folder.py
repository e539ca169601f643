"""Taking up a run: what may have changed since it was started, and what is refused with the difference."""

from pathlib import Path

import pytest

from penstock.config import RunConfig, load_config
from penstock.errors import ConfigError
from penstock.run.folder import open_run_folder

pytestmark = pytest.mark.project(tasks=1)


def config(*overrides: str) -> RunConfig:
    return load_config(Path("train.toml"), overrides)


@pytest.mark.parametrize(
    "change", ["train.steps=99", "train.eval_every=2", "eval.samples=4", "scale.name='ray'", "gateway.port=1", "executor.x=1"]
)
def test_what_changes_nothing_that_was_trained_may_change(project, change):
    assert not open_run_folder(config(), fresh=False).resumed
    assert open_run_folder(config(change), fresh=False).resumed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.lr=1", "train.lr = 2e-05, now it is 1"),
        ("rollout.group_size=2", "rollout.group_size = 8, now it is 2"),
        ("agent.flow='other'", "agent.flow = '', now it is 'other'"),
        ("engine.name='sglang'", "engine."),
    ],
)
def test_what_changes_the_training_is_refused_with_the_difference(project, change, said):
    open_run_folder(config(), fresh=False)
    changed = [change, *(["engine.url=['http://127.0.0.1:1']"] if "sglang" in change else [])]
    with pytest.raises(ConfigError, match="--fresh") as refused:
        open_run_folder(config(*changed), fresh=False)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("policies.judge.engine.url='http://b/v1'", None),
        ("policies.judge.model='other'", "policies.judge.model = 'm', now it is 'other'"),
        ("policies.planner={}", "policies.planner.default = None, now it is False"),
    ],
)
def test_policy_address_may_change_but_not_the_policy(project, change, said):
    with (project / "train.toml").open("a") as file:
        file.write("[policies.judge]\nfrozen = true\nmodel = 'm'\n[policies.judge.engine]\nname = 'openai'\nurl = 'http://a/v1'\n")
    open_run_folder(config(), fresh=False)
    if said is None:
        assert open_run_folder(config(change), fresh=False).resumed
    else:
        with pytest.raises(ConfigError, match="--fresh") as refused:
            open_run_folder(config(change), fresh=False)
        assert said in str(refused.value)


def test_edited_file_is_named_and_fresh_keeps_old_run(project):
    open_run_folder(config(), fresh=False, digests={"train.toml": "0"})
    (project / "tasks.jsonl").write_text('{"prompt": "2 times 2?"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl"):
        open_run_folder(config(), fresh=False)
    assert not open_run_folder(config(), fresh=True).resumed
    assert (project / "runs" / "run.old1" / "config.json").is_file()
