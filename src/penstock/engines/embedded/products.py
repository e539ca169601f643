"""Batched matrix products whose sums stay in float32, whatever precision the cache has."""

import torch
from torch import Tensor


def plus_product(first: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """first + scale * a @ b, in float32. `first` may be broadcast."""
    if b.dtype == torch.float32:
        return torch.baddbmm(first, a, b, alpha=scale)
    return _product(a, b).mul_(scale).add_(first)


def put_product(into: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """into = scale * a @ b, where `into` is float32; what it held, infinities too, is gone."""
    if b.dtype == torch.float32:
        into.baddbmm_(a, b, beta=0.0, alpha=scale)
    else:
        torch.mul(_product(a, b), scale, out=into)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, where `into` is float32."""
    if b.dtype == torch.float32:
        into.baddbmm_(a, b)
    else:
        into += _product(a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    return torch.bmm(a, b) if b.dtype == torch.float32 else _product(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if b.is_cuda:  # tensor cores, with the sum as it is before rounding
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
