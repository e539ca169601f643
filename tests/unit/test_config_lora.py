"""Settings of `train.method = "lora"`."""

from typing import Any

import pytest

from penstock.config import LORA_MODULES, RunConfig, make_config
from penstock.errors import ConfigError


def config(**train: Any) -> RunConfig:
    return make_config({"dataset": {"train": "tasks.jsonl"}, "train": train}, "run.toml")


def test_each_method_has_a_learning_rate():
    assert config().train.lr == 2e-5
    assert config(method="lora").train.lr == 5e-4
    assert config(method="lora", lr=1e-3).train.lr == 1e-3


def test_all_linear_layers_but_the_head_are_adapted():
    assert config(method="lora").train.target_modules == LORA_MODULES
    assert config(method="lora", target_modules=["q_proj"]).train.target_modules == ("q_proj",)


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ({"rank": 4}, "train.rank = 4: is a setting of train.method = 'lora'"),
        ({"alpha": 4.0}, "train.alpha"),
        ({"target_modules": ["q_proj"]}, "train.target_modules"),
        ({"method": "lora", "target_modules": ["lm_head"]}, "train.target_modules"),
        ({"method": "lora", "target_modules": []}, "train.target_modules"),
        ({"method": "lora", "rank": 0}, "train.rank"),
        ({"method": "qlora"}, "train.method"),
    ],
)
def test_setting_that_would_be_ignored_or_is_wrong_is_rejected(train: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        config(**train)


def test_a_stored_config_reads_as_it_was():
    for one in (config(), config(method="lora", rank=8)):
        assert make_config(one.model_dump(mode="json"), "config.json") == one
