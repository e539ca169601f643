"""Attention over a prefix tree in one call: on a GPU, all rows of a pass go through one kernel.

A pass lays out its tree depth first (see `batches.py`), so the queries that read a key lie side by side: from its own token up to
where the last row below it stops. Two numbers per key thus describe the whole tree: query q reads key k if first[k] <= q < end[k].
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from penstock.train.batches import Pass
from penstock.train.transfer import to_device

BLOCK = 128
"""The kernel skips blocks of this many queries and keys where no query reads a key."""


class TreeMask(NamedTuple):
    """Which keys each token of a pass reads. Keys are those of the trunk, then those of the pass."""

    first: Tensor
    """[keys], int32: the first token of the pass that reads the key."""
    end: Tensor
    """[keys], int32: one more than the last that does."""
    queries: int
    """Tokens of the pass."""

    def dense(self) -> Tensor:
        """Returns [queries, keys]: True where the token reads the key."""
        query = torch.arange(self.queries, device=self.end.device).unsqueeze(1)
        return (self.first <= query) & (query < self.end)

    def blocks(self) -> BlockMask:
        """Returns the same for flex attention. The numbers of queries and keys must be multiples of `BLOCK`."""
        start = torch.arange(0, self.queries, BLOCK, device=self.end.device).unsqueeze(1)
        first, end = self.first.view(-1, BLOCK), self.end.view(-1, BLOCK)
        read = (first.amin(1) < start + BLOCK) & (start < end.amax(1))
        whole = (first.amax(1) <= start) & (start + BLOCK <= end.amin(1))
        return BlockMask.from_kv_blocks(
            *_listed(read & ~whole),
            *_listed(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=_reads(self.first, self.end),
            seq_lengths=(self.queries, len(self.end)),
        )


def tree_mask(one: Pass, *, trunk: int, padded: tuple[int, int], device: torch.device) -> TreeMask:
    """Returns the mask of a pass below a trunk of the given length.

    `padded` are the lengths of trunk and pass with padding behind each. Padding of the pass reads itself only; nothing reads that
    of the trunk.
    """
    before, length = padded
    numbers = np.zeros((2, before + length), np.int32)
    firsts, ends = numbers
    ends[:trunk] = length
    firsts[before:] = np.arange(length)
    ends[before:] = firsts[before:] + 1
    for row in one.rows:  # in the order of the layout, so the last row that reads a token decides
        for start, stop in (*row.spans, (row.start, row.stop)):
            ends[before + start : before + stop] = row.stop
    first, end = to_device(numbers, device)
    return TreeMask(first, end, length)


def _reads(first: Tensor, end: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def reads(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[key] <= query) & (query < end[key])

    return reads


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[queries, keys] → how many blocks of keys each block of queries has, and which, those first: [1, 1, queries(, keys)]."""
    order = torch.argsort(blocks.to(torch.int32), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
