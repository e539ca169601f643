"""Rounding of float32 master weights to the bfloat16 weights that are served, so that small updates survive in expectation.

An update of 2e-5 is a twentieth of the distance between two neighbouring bfloat16 numbers near 0.1. Rounding to the nearest loses
it until a dozen such updates add up. Here each weight has its own threshold between 0 and 1, drawn once by the run's seed: it is
rounded away from zero if the part of it that bfloat16 cannot hold, as a share of that distance, is above the threshold. So a
twentieth of the weights moves by a whole distance, and the sum of all is right.

The thresholds do not change between versions: served weights are a function of masters and seed, on any device, and differ from one
version to the next by the update alone. A weight that bfloat16 can hold is never changed.
"""

import torch
from torch import Tensor

from penstock.train import compiling

LOW_BITS = 16
"""Bits of a float32 that bfloat16 lacks."""
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
"""Odd numbers that spread every bit of a 32-bit integer over all others; signed."""


def round_to_bfloat16(values: Tensor, *, seed: int, first: int, compiled: bool = False) -> Tensor:
    """Returns float32 `values` [n] rounded to numbers that bfloat16 can hold, still in float32.

    `first` is the index of the first value among all weights of the model.
    """
    rounded = compiling.compiled(_rounded) if compiled else _rounded
    return rounded(values, _scalar(first, values.device), _scalar(seed * 0x9E3779B1, values.device))


def thresholds(count: int, *, seed: int, first: int, device: torch.device) -> Tensor:
    """Returns int32 numbers in [0, 2**16), [count]: those of the weights from `first` on."""
    return _thresholds(count, _scalar(first, device), _scalar(seed * 0x9E3779B1, device))


def _rounded(values: Tensor, first: Tensor, key: Tensor) -> Tensor:
    bits = values.view(torch.int32) + _thresholds(len(values), first, key)
    return bits.bitwise_and_(-(1 << LOW_BITS)).view(torch.float32)


def _thresholds(count: int, first: Tensor, key: Tensor) -> Tensor:
    x = _mix(torch.arange(count, dtype=torch.int32, device=first.device).add_(first))
    return _mix(x.bitwise_xor_(key)).bitwise_and_((1 << LOW_BITS) - 1)


def _mix(x: Tensor) -> Tensor:
    """Hashes each integer in place, so that neighbours have nothing in common."""
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        x.bitwise_xor_(_shifted(x, shift)).mul_(multiplier)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)  # without the copies of the sign


def _scalar(x: int, device: torch.device) -> Tensor:
    """Returns the lowest 32 bits as a signed number: a tensor, as compiled code would compute with 64 bits of a plain one."""
    return torch.full((), (x + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=device)
