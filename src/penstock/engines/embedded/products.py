"""Batched matrix products whose sums stay in float32, whatever precision the cache has."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    if b.dtype == torch.float32:
        return torch.bmm(a, b)
    if b.is_cuda:  # tensor cores, with the sum as it is before rounding
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def plus_product(first: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """first + scale * a @ b, in float32. `first` may be broadcast."""
    if b.dtype == torch.float32:
        return torch.baddbmm(first, a, b, alpha=scale)
    return product(a, b).mul_(scale).add_(first)


def put_product(into: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """into = scale * a @ b, where `into` is float32; a product straight into strided memory would run head by head."""
    torch.mul(product(a, b), scale, out=into)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, where `into` is float32."""
    if b.dtype == torch.float32 and into.is_contiguous():
        into.baddbmm_(a, b)
    else:
        into += product(a, b)
