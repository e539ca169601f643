"""Rounding to bfloat16: right in expectation over weights at every version, the same on any way to a value, and no fresh noise."""

import pytest
import torch
from torch import Tensor

from penstock.train.precision import round_to_bfloat16, thresholds

COUNT = 1 << 16
CPU = torch.device("cpu")


def rounded(values: Tensor, seed: int = 3) -> Tensor:
    return round_to_bfloat16(values, seed=seed, first=0)


def some_weights(seed: int = 0) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)) * 0.1


def grid(values: Tensor) -> Tensor:
    """The distance between the two bfloat16 numbers around each value."""
    return (2.0 ** (values.abs().log2().floor() - 7)).clamp_min(torch.finfo(torch.bfloat16).tiny)


def test_a_value_becomes_one_of_its_two_neighbours():
    values = some_weights()
    served = rounded(values)
    assert torch.equal(served.bfloat16().float(), served)
    assert ((served - values).abs() < grid(values)).all() and not torch.equal(served, values.bfloat16().float())


def test_what_bfloat16_holds_is_left_alone():
    held = torch.cat((some_weights().bfloat16().float(), torch.tensor([0.0, -0.0, 1e-40, float("inf"), -3.0]).bfloat16().float()))
    assert torch.equal(rounded(held), held)


@pytest.mark.parametrize("part", [0.05, 0.5, 0.93])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_share_matches_bfloat16(part: float, sign: float):
    served = rounded(torch.full((COUNT,), sign * (1.0 + part / 128)))
    assert served.abs().unique().tolist() == [1.0, 1.0 + 1 / 128]
    assert (served.abs() > 1.0).double().mean().item() == pytest.approx(part, abs=0.005)


def test_thresholds_depend_on_seed_and_index_alone():
    values = some_weights()
    pieces = [round_to_bfloat16(values[at : at + 1000], seed=3, first=at) for at in range(0, COUNT, 1000)]
    assert torch.equal(torch.cat(pieces), rounded(values))
    far = thresholds(4, seed=3, first=2**33 + 5, device=CPU)  # models have more weights than a 32-bit index
    assert ((far >= 0) & (far < 2**16)).all()
    one, other = (thresholds(COUNT, seed=seed, first=0, device=CPU).double() for seed in (3, 4))
    assert abs(torch.corrcoef(torch.stack((one, other)))[0, 1].item()) < 0.02
    assert abs(torch.corrcoef(torch.stack((one[1:], one[:-1])))[0, 1].item()) < 0.02


def test_small_updates_survive_stochastic_rounding():
    """Masters that lie on the grid, as those of a published bfloat16 model do, and steps of a twentieth of it."""
    start = some_weights().bfloat16().float()
    unit = grid(start)
    signs = torch.randint(0, 2, (COUNT,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1.0
    for step in range(1, 10):
        wanted = signs * unit * step / 20
        arrived = (rounded(start + wanted) - start) @ wanted / (wanted @ wanted)
        assert arrived.item() == pytest.approx(1.0, abs=0.03)
        nearest = (start + wanted).bfloat16().float() - start
        assert (nearest != 0).double().mean() < 0.02  # but for the few next to a power of two, where the grid is finer


def test_over_many_steps_served_weights_follow_masters_without_drift():
    """Weights walk back and forth below the grid. Each version has the walk so far, and the same way back ends where it began."""
    random = torch.Generator().manual_seed(2)
    start = some_weights(5).bfloat16().float()
    unit = grid(start)
    steps = [torch.randn(COUNT, generator=random) * unit / 20 for _ in range(100)]
    path = [start]
    for change in (*steps, *(-change for change in reversed(steps))):
        path.append(path[-1] + change)
    versions = [rounded(master) for master in path]
    for at in (20, 60, 100, 140):
        wanted = path[at] - start
        assert ((versions[at] - start) @ wanted / (wanted @ wanted)).item() == pytest.approx(1.0, abs=0.05)
        error = (versions[at] - path[at]) / unit
        assert abs(error.mean().item()) < 0.01 and error.abs().max() < 2.01  # 2: a walk may cross into a coarser grid
    back = (path[-1] - start).abs() < unit * 1e-3  # float32 sums are not exact
    assert back.double().mean() > 0.99 and (versions[-1][back] != start[back]).double().mean() < 1e-3


def test_version_differs_from_one_before_by_update_alone():
    """With fresh thresholds each time, a third of the weights would change at every version, however small the update."""
    master = some_weights()
    change = grid(master) / 20
    assert torch.equal(rounded(master), rounded(master.clone()))
    moved = (rounded(master + change) != rounded(master)).double().mean().item()
    assert moved == pytest.approx(1 / 20, abs=0.01)
    assert (rounded(master, seed=1) != rounded(master, seed=2)).double().mean() > 0.25
