"""`penstock train` validates its config once: what was checked is passed on, not checked again."""

from pathlib import Path
from typing import Any

from penstock.cli.app import run
from penstock.config import RunConfig

CONFIG = Path(__file__).parents[2] / "helpers/tiny_run/train.toml"


def test_a_training_run_validates_its_config_once(tmp_path, monkeypatch, capsys):
    validated, plain = list[type](), RunConfig.model_validate.__func__

    def counted(cls: type[RunConfig], tree: Any, **options: Any) -> RunConfig:
        validated.append(cls)
        return plain(cls, tree, **options)

    monkeypatch.setattr(RunConfig, "model_validate", classmethod(counted))  # patched: a validation leaves no trace
    settings = [f'run.folder="{tmp_path}"', "train.steps=1", "rollout.groups_per_step=1", "rollout.group_size=2"]
    assert run(["train", str(CONFIG), *(word for each in settings for word in ("--set", each))]) == 0, capsys.readouterr()
    assert len(validated) == 1
