"""How old a group may be when it is trained: counted in steps, whatever numbers their versions have."""

from types import SimpleNamespace

import pytest

from penstock.train.loop import max_versions_behind
from penstock.train.resources import TrainProgress


@pytest.mark.parametrize(
    ("max_staleness", "updates", "progress", "numbers"),
    [
        (1, 1, TrainProgress(step=0, version=0), 1),
        (1, 1, TrainProgress(step=3, version=3, past=(2, 3)), 1),
        (0, 1, TrainProgress(step=3, version=3, past=(3,)), 0),
        (1, 2, TrainProgress(step=2, version=4, past=(2, 4)), 2),
        (
            1,
            1,
            TrainProgress(step=1, version=3, past=(0, 3)),
            3,
        ),  # a kill undid versions 1 and 2, and their numbers are not used again
        (2, 1, TrainProgress(step=4, version=9, past=(2, 8, 9)), 7),
        (1, 1, TrainProgress(step=3, version=1, past=(1, 1)), 1),  # steps that had nothing to teach
    ],
)
def test_group_may_be_as_many_steps_behind_as_is_allowed(max_staleness, updates, progress, numbers) -> None:
    config = SimpleNamespace(rollout=SimpleNamespace(max_staleness=max_staleness), train=SimpleNamespace(updates_per_step=updates))
    assert max_versions_behind(SimpleNamespace(config=config), progress) == numbers
