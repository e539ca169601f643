import math

import pytest
import torch

from penstock.config import TrainSection
from penstock.train.losses import LOSSES
from penstock.train.losses.base import LossTokens, k3
from penstock.train.losses.clip import clip

SECTION = TrainSection(clip_low=0.2, clip_high=0.3, importance_cap=2.0)


def tokens(ratio: list[float], advantages: list[float], importance: list[float] | None = None) -> LossTokens:
    """Tokens whose probabilities are chosen by the ratios that they must have."""
    proximal = torch.full((len(ratio),), -1.0)
    new = (proximal + torch.tensor(ratio).log()).requires_grad_()
    behaviour = proximal - torch.tensor(importance or [1.0] * len(ratio)).log()
    return LossTokens(new, proximal, behaviour, torch.tensor(advantages))


def test_inside_the_bounds_the_loss_is_minus_ratio_times_advantage():
    result = clip(tokens([1.0, 1.1, 0.9], [2.0, 2.0, -2.0]), SECTION)
    assert result.values.tolist() == pytest.approx([-2.0, -2.2, 1.8])
    assert result.clipped.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 1.0, -1.3, 0.0),  # likelier and good: enough is enough
        (1.5, -1.0, 1.5, 1.5),  # likelier and bad: push all the way back
        (0.5, 1.0, -0.5, -0.5),  # rarer and good: pull all the way back
        (0.5, -1.0, 0.8, 0.0),  # rarer and bad: enough is enough
        (1.25, 1.0, -1.25, -1.25),  # the upper bound is the wider one
    ],
)
def test_the_clip_stops_only_what_has_gone_far_enough(ratio: float, advantage: float, value: float, gradient: float):
    given = tokens([ratio], [advantage])
    result = clip(given, SECTION)
    result.values.sum().backward()
    assert result.values.item() == pytest.approx(value)
    assert given.new.grad is not None and given.new.grad.item() == pytest.approx(gradient)
    assert result.clipped.item() == (gradient == 0.0)


def test_the_importance_weight_scales_the_loss_up_to_its_cap():
    result = clip(tokens([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], importance=[0.5, 1.5, 40.0]), SECTION)
    assert result.importance.tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert result.values.tolist() == pytest.approx([-0.5, -1.5, -2.0])


def test_the_importance_weight_has_no_gradient():
    given = tokens([1.0], [1.0], importance=[1.5])
    given = given._replace(proximal=given.new)
    result = clip(given, SECTION)
    assert not result.importance.requires_grad and not result.ratio.requires_grad


def test_the_first_update_has_the_gradient_of_reinforce():
    new = torch.tensor([-0.3, -2.0], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5])
    clip(LossTokens(new, new.detach(), new.detach(), advantages), SECTION).values.sum().backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-1.5, 0.5])


def test_k3_is_the_gap_worked_by_hand_and_never_negative():
    new, reference = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -0.5])
    assert k3(new, reference).tolist() == pytest.approx([0.0, math.exp(-1), math.exp(0.5) - 1.5])
    assert (k3(torch.randn(100), torch.randn(100)) >= 0).all()


def test_the_mean_of_k3_is_the_divergence():
    new, reference = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert (new.exp() * k3(new, reference)).sum().item() == pytest.approx((new.exp() * (new - reference)).sum().item())


def test_every_loss_of_the_table_loads():
    assert all(callable(LOSSES.load(name)) for name in LOSSES)
