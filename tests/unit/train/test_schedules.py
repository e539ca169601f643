import math

import pytest
import torch

from penstock.config import TrainSection, validate
from penstock.errors import ConfigError
from penstock.train.optim import OPTIMIZERS, Schedule, lr_share, make_optimizer


def shares(schedule: Schedule, *, warmup: int = 0, total: int = 5, floor: float = 0.0, updates: int = 5) -> list[float]:
    return [lr_share(update, schedule=schedule, warmup=warmup, total=total, floor=floor) for update in range(updates)]


def test_the_rate_stays_rises_and_falls_as_worked_by_hand():
    assert shares("constant") == [1.0] * 5
    assert shares("constant", warmup=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares("linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert shares("linear", warmup=1, floor=0.2) == pytest.approx([0.5, 1.0, 0.2 + 0.8 * 2 / 3, 0.2 + 0.8 / 3, 0.2])
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert shares("cosine") == pytest.approx([1.0, quarter, 0.5, 1 - quarter, 0.0])


def test_run_that_continues_stays_at_floor():
    assert shares("cosine", floor=0.1, updates=8)[-4:] == pytest.approx([0.1] * 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_down_the_slope(name: str):
    weights = {"layer.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)}
    optimizer = make_optimizer(weights, TrainSection(optimizer=name, lr=1e-2))
    for _ in range(3):
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.updates == 3
    assert all(bool((weight < 1.0).all()) for weight in weights.values()) or name == "muon"
    assert float(weights["layer.weight"].sum()) < 16.0  # Muon moves a matrix of rank one along its largest direction


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "addamw"}, "did you mean 'adamw'"),
        ({"optimizer": "lbfgs"}, "there is no such optimizer"),
        ({"optimizer_settings": {"momentum": 0.9}}, "adamw has no setting 'momentum'; it has betas, eps"),
        ({"optimizer": "sgd", "optimizer_settings": {"momentm": 0.9}}, "sgd has no setting 'momentm'"),
        ({"optimizer": "sgd", "optimizer_settings": {"lr": 0.9}}, r"set train\.lr"),
        ({"optimizer": "sgd", "optimizer_settings": {"momentum": -1.0}}, "sgd does not take them"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, r"train\.weight_decay has no meaning"),
    ],
)
def test_what_an_optimizer_would_ignore_is_refused(settings: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        make_optimizer({"w": torch.ones(2)}, TrainSection.model_validate(settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kl_estimator": "k2"}, "no effect while train.kl is 0"),
        ({"kl": 0.1, "reference_every": 4}, "set that to 'moving'"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "0 in expectation; set kl_in = 'reward'"),
        ({"lr_floor": 0.1}, "train.schedule is 'constant'"),
        ({"overlong": [500, 400]}, "must be below the second"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        validate(TrainSection, settings, "train.toml")
