import math

import pytest
import torch

from penstock.config import TrainSection
from penstock.errors import ConfigError
from penstock.train.algorithm import load_loss
from penstock.train.losses import LOSSES
from penstock.train.losses.base import Loss, LossTokens, k2, k3
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


def grad_of(name: str, given: LossTokens, **settings: object) -> list[float]:
    result = load_loss(TrainSection(loss=name, loss_settings=settings))(given)
    result.values.sum().backward()
    assert given.new.grad is not None
    return given.new.grad.tolist()


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_first_update_of_every_loss_goes_along_the_advantage(name: str):
    """On policy, with one token to each sequence, every loss has the gradient of REINFORCE."""
    new = torch.tensor([-0.3, -2.0], requires_grad=True)
    ids = torch.tensor([0, 1])
    given = LossTokens(new, new.detach(), new.detach(), torch.tensor([1.5, -0.5]), ids, ids)
    assert grad_of(name, given) == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize("name", list(LOSSES))
def test_no_loss_lets_the_importance_weight_pass_a_gradient(name: str):
    given = tokens([1.1, 0.9], [1.0, -1.0], importance=[1.5, 0.7])._replace(
        sequences=torch.tensor([0, 1]), turns=torch.tensor([0, 1])
    )
    result = load_loss(TrainSection(loss=name))(given)
    assert result.values.requires_grad
    assert not any(each.requires_grad for each in (result.ratio, result.importance, result.clipped))


def test_dapo_clips_as_clip_does():
    given = tokens([1.5, 1.1, 0.5], [1.0, -1.0, -1.0], importance=[1.0, 1.5, 3.0])
    own = load_loss(TrainSection(loss="dapo", loss_settings={"clip_high": 0.3}))(given)
    assert own.values.tolist() == pytest.approx(clip(given, SECTION).values.tolist())


def test_gspo_has_one_ratio_for_a_sequence():
    given = tokens([1.2, 1.2, 2.0], [1.0, 1.0, -1.0])._replace(sequences=torch.tensor([0, 0, 1]), turns=torch.tensor([0, 1, 2]))
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    result = load_loss(TrainSection(loss="gspo", loss_settings=wide))(given)
    assert result.ratio.tolist() == pytest.approx([1.2, 1.2, 2.0]) and result.clipped.tolist() == [0.0, 0.0, 0.0]
    # two tokens at 1.0 * 1.44 have the geometric mean 1.2; each value is -1.2, and each token moves both values by half
    uneven = tokens([1.0, 1.44], [1.0, 1.0])._replace(sequences=torch.tensor([0, 0]), turns=torch.tensor([0, 1]))
    assert load_loss(TrainSection(loss="gspo", loss_settings=wide))(uneven).values.tolist() == pytest.approx([-1.2, -1.2])
    assert grad_of("gspo", uneven, **wide) == pytest.approx([-1.2, -1.2])


def test_gspo_clips_all_tokens_of_a_sequence_or_none():
    given = tokens([1.0, 1.001, 1.0], [1.0, 1.0, 1.0])._replace(sequences=torch.tensor([0, 0, 1]), turns=torch.tensor([0, 0, 1]))
    result = load_loss(TrainSection(loss="gspo"))(given)  # a mean of 1.0005 is above 1 + 4e-4, though one token is at 1
    assert result.clipped.tolist() == [1.0, 1.0, 0.0]
    assert grad_of("gspo", given) == pytest.approx([0.0, 0.0, -1.0])


def test_gspo_can_have_a_ratio_for_each_turn():
    given = tokens([1.0, 1.0, 1.001], [1.0, 1.0, 1.0])._replace(sequences=torch.tensor([0, 0, 0]), turns=torch.tensor([0, 0, 1]))
    assert load_loss(TrainSection(loss="gspo", loss_settings={"level": "turn"}))(given).clipped.tolist() == [0.0, 0.0, 1.0]


def test_cispo_never_stops_a_gradient():
    assert grad_of("cispo", tokens([3.0, 0.1], [2.0, -2.0])) == pytest.approx([-2.0 * 1.28, 2.0 * 0.1])


def test_sapo_fades_with_the_distance():
    given = tokens([2.0], [1.0])
    gate = 1 / (1 + math.exp(-1.0))
    assert load_loss(TrainSection(loss="sapo"))(given).values.item() == pytest.approx(-4 * gate)
    assert grad_of("sapo", given) == pytest.approx([-4 * gate * (1 - gate) * 2.0])
    gate = 1 / (1 + math.exp(-1.05 * 0.5))
    assert load_loss(TrainSection(loss="sapo"))(tokens([1.5], [-1.0])).values.item() == pytest.approx(4 / 1.05 * gate)


def test_icepop_leaves_out_what_differs_too_much_either_way():
    given = tokens([1.0] * 4, [1.0] * 4, importance=[0.4, 0.6, 4.0, 6.0])
    result = load_loss(TrainSection(loss="icepop"))(given)
    assert result.importance.tolist() == pytest.approx([0.0, 0.6, 4.0, 0.0])
    assert result.clipped.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert grad_of("icepop", given) == pytest.approx([0.0, -0.6, -4.0, 0.0])


def test_reinforce_weighs_by_where_a_token_was_sampled():
    # 1.5 times likelier than before the batch, where it was 1.2 times likelier than for the engine
    assert grad_of("reinforce", tokens([1.5], [2.0], importance=[1.2])) == pytest.approx([-2.0 * 1.8])
    assert grad_of("reinforce", tokens([1.5], [2.0], importance=[4.0])) == pytest.approx([-2.0 * 2.0])


def test_likelihood_does_not_ask_where_a_token_came_from():
    given = tokens([3.0, 0.5], [2.0, -0.5], importance=[4.0, 0.1])  # at log-probabilities of -1 + log 3 and -1 - log 2
    made = load_loss(TrainSection(loss="likelihood"))(given)
    assert made.values.tolist() == pytest.approx([-2.0 * (math.log(3.0) - 1.0), 0.5 * (-math.log(2.0) - 1.0)])
    assert made.importance.tolist() == [1.0, 1.0] and made.clipped.tolist() == [0.0, 0.0]
    assert grad_of("likelihood", given) == pytest.approx([-2.0, 0.5])


def test_k2_has_the_gradient_of_the_divergence():
    given, reference = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = given.clone().requires_grad_()
    new = weights.log_softmax(-1)
    divergence = (new.exp() * (new - reference.log_softmax(-1))).sum()
    (truth,) = torch.autograd.grad(divergence, [weights], retain_graph=True)
    estimate = (new.detach().exp() * k2(new, reference.log_softmax(-1))).sum()
    (slope,) = torch.autograd.grad(estimate, [weights])
    assert slope.tolist() == pytest.approx(truth.tolist())
    assert k2(torch.tensor([-1.0]), torch.tensor([-3.0])).item() == 2.0


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clip"])
def test_settings_that_a_loss_would_ignore_are_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name!r}"):
        load_loss(TrainSection(loss=name, clip_low=0.1))
    with pytest.raises(ConfigError, match=r"\[train\.loss_settings\]"):
        load_loss(TrainSection(loss=name, loss_settings={"clip_hi": 0.1}))


def test_settings_of_clip_are_those_of_the_section():
    with pytest.raises(ConfigError, match=r"train\.clip_low"):
        load_loss(TrainSection(loss_settings={"clip_low": 0.1}))


def older(tokens: LossTokens, section: TrainSection) -> Loss:
    """As a plug-in of before settings and sequences."""
    return clip(tokens, section)


def test_a_plug_in_of_the_older_form_stays_valid():
    given = tokens([1.5], [1.0])
    made = load_loss(TrainSection(loss=f"{__name__}:older", clip_high=0.1))(given)
    assert made.values.item() == pytest.approx(-1.1)
