from typing import Any

import pytest

from penstock.config import make_config
from penstock.errors import ConfigError
from penstock.train.algorithm import refuse_branches


def config(**sections: dict[str, Any]) -> Any:
    tree: dict[str, Any] = {"run": {"name": "r"}, "dataset": {"train": "tasks.jsonl"}, **sections}
    return make_config(tree, "the test")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"advantage": "vine"}}, "set rollout.branches"),
        ({"rollout": {"branches": 4}}, "'grpo' has no use for rollout.branches"),
        ({"rollout": {"branches": 4}, "train": {"advantage": "vine", "kl": 0.1, "kl_in": "reward"}}, "train.kl_in = 'loss'"),
    ],
)
def test_settings_that_would_have_no_meaning_are_refused(sections: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        refuse_branches(config(**sections))


def test_branches_with_their_advantage_and_neither_are_fine():
    refuse_branches(config(rollout={"branches": 4}, train={"advantage": "vine"}))
    refuse_branches(config())
