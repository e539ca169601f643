"""Attention over a prefix tree by plain causal attention: each path from the root to a leaf is copied out and attends by itself.

Where paths share little beside their prompt, as rollouts of many turns do, this wastes little, and a GPU's own causal attention is
faster than any kernel with a mask. Only attention sees the copies; all other layers see each token once.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.train.batches import Pass
from penstock.train.transfer import to_device

Indices = npt.NDArray[np.int64]

ALIKE = 0.75
"""Paths attend together, padded to the longest, if the shortest has at least this share of its length."""
STEPS_LOG2 = 6
"""Lengths are padded to one of 32 steps between a power of two and the next: cuDNN takes 0.15 s to prepare for each new length."""
FASTER = 1.5
"""How much more work per second causal attention does than attention with a mask."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PathChunk(NamedTuple):
    paths: int
    length: int


class PathCopies(NamedTuple):
    """How tokens are copied to paths and back. A *place* is an index into all paths, side by side and padded."""

    source: Tensor
    """[places]: the token that is copied there; any for padding."""
    owner: Tensor
    """[tokens]: the first place of each; any for those that are on no path."""
    idle: Tensor
    """Places that are no token's first."""
    unused: Tensor
    """Tokens that are on no path."""
    shared: Tensor
    """Tokens with several places,"""
    extra: Tensor
    """their other places,"""
    slot: Tensor
    """and the index into `shared` of each."""


class PathMask(NamedTuple):
    """The paths of a pass. Keys are those of the trunk, then those of the pass."""

    chunks: list[PathChunk]
    queries: PathCopies
    """Of the pass alone: a place of the trunk has no query."""
    keys: PathCopies


def path_area(one: Pass, trunk: int) -> int:
    """Returns how many pairs of query and key the paths have, twice."""
    lengths = sorted((trunk + sum(stop - start for start, stop in path) for path in _paths(one)), reverse=True)
    return sum(chunk.paths * chunk.length**2 for chunk in _chunks(lengths))


def tree_area(one: Pass) -> int:
    """Returns how many pairs of query and key the tree has, twice."""
    return 2 * sum(one.positions) + 2 * len(one.positions)


def path_mask(one: Pass, *, trunk: int, padded: tuple[int, int], device: torch.device) -> PathMask:
    """Returns the paths of a pass below a trunk of the given length. `padded` are the lengths of trunk and pass with padding."""
    paths = [np.concatenate([np.arange(start, stop) for start, stop in path]) for path in _paths(one)]
    paths.sort(key=len, reverse=True)
    chunks = _chunks([trunk + len(path) for path in paths])
    lengths = [chunk.length for chunk in chunks for _ in range(chunk.paths)]
    starts = np.cumsum([0, *lengths])
    queries, keys = np.full((2, starts[-1]), -1)
    for path, start in zip(paths, starts, strict=False):
        own = slice(start + trunk, start + trunk + len(path))
        queries[own], keys[own] = path, path + padded[0]
        keys[start : own.start] = np.arange(trunk)
    parts = (*_copies(queries, padded[1]), *_copies(keys, sum(padded)))
    sent = _split(to_device(np.concatenate(parts), device), [len(part) for part in parts])
    half = len(PathCopies._fields)
    return PathMask(chunks, PathCopies(*sent[:half]), PathCopies(*sent[half:]))


def attend_paths(q: Tensor, k: Tensor, v: Tensor, mask: PathMask) -> Tensor:
    """q, k, v and the result are [1, time, heads, dim]."""
    sizes = [chunk.paths * chunk.length for chunk in mask.chunks]
    parts = [_split(_to_paths(x, copies), sizes) for x, copies in ((q, mask.queries), (k, mask.keys), (v, mask.keys))]
    attended: list[Tensor] = []
    with sdpa_kernel(BACKENDS, set_priority=True):
        for chunk, *heads in zip(mask.chunks, *parts, strict=True):
            a, b, c = (part.view(*chunk, *part.shape[1:]).transpose(1, 2) for part in heads)
            mixed = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=a.shape[1] != b.shape[1])
            attended.append(mixed.transpose(1, 2).flatten(0, 1))
    whole = attended[0] if len(attended) == 1 else torch.cat(attended)
    return cast(Tensor, _FromPaths.apply(whole, mask.queries)).unsqueeze(0)


def _split(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return torch.split(x, sizes)  # pyright: ignore[reportReturnType, reportUnknownVariableType]


def _to_paths(x: Tensor, copies: PathCopies) -> Tensor:
    """[1, time, heads, dim] → [places, heads, dim]."""
    return cast(Tensor, _ToPaths.apply(x[0], copies))


class _ToPaths(torch.autograd.Function):
    """[tokens, heads, dim] → [places, heads, dim]. Gradients of a token are summed over its places, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: PathCopies) -> Any:
        ctx.copies = copies
        return x.index_select(0, copies.source)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gradient, copies = grad_outputs[0], cast(PathCopies, ctx.copies)
        own = gradient.index_select(0, copies.owner).index_fill_(0, copies.unused, 0)
        if len(copies.shared):
            sums = own.index_select(0, copies.shared).float()
            sums.index_add_(0, copies.slot, gradient.index_select(0, copies.extra).float())
            own.index_copy_(0, copies.shared, sums.to(own.dtype))
        return own, None


class _FromPaths(torch.autograd.Function):
    """[places, heads, dim] → [tokens, heads, dim], from the first place of each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: PathCopies) -> Any:
        ctx.copies = copies
        return x.index_select(0, copies.owner)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        copies = cast(PathCopies, ctx.copies)
        return grad_outputs[0].index_select(0, copies.source).index_fill_(0, copies.idle, 0), None


def _paths(one: Pass) -> "list[list[tuple[int, int]]]":
    """Returns the spans of each path below the trunk, in order."""
    inner = {stop for row in one.rows for _, stop in row.spans}
    return [
        [*row.spans, (row.start, row.stop)] for row in one.rows if row.stop not in inner
    ]  # else another path goes on from its end


def _chunks(lengths: list[int]) -> list[PathChunk]:
    """Takes lengths in falling order."""
    chunks: list[PathChunk] = []
    for length in lengths:
        if chunks and length >= ALIKE * chunks[-1].length:
            chunks[-1] = PathChunk(chunks[-1].paths + 1, chunks[-1].length)
        else:
            step = max(1, 1 << length.bit_length() >> STEPS_LOG2)
            chunks.append(PathChunk(1, -(-length // step) * step))
    return chunks


def _copies(source: Indices, tokens: int) -> tuple[Indices, ...]:
    """Returns the fields of `PathCopies`. `source` [places]: the token of each, -1 for none."""
    places = np.flatnonzero(source >= 0)
    order = places[np.argsort(source[places], kind="stable")]
    token = source[order]
    first = np.ones(len(token), bool)
    first[1:] = token[1:] != token[:-1]
    owner = np.full(tokens, -1)
    owner[token[first]] = order[first]
    shared, slot = np.unique(token[~first], return_inverse=True)
    idle = np.setdiff1d(np.arange(len(source)), order[first], assume_unique=True)
    return source.clip(0), owner.clip(0), idle, np.flatnonzero(owner < 0), shared, order[~first], slot
