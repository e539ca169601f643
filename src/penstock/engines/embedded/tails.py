"""Keys and values of each running request's own last tokens: one row per slot, so that all rows are read by one product.

Keys lie transposed ([dim, tokens]): the product of one query with them then runs along memory, twice as fast on a CPU.
"""

import torch

from penstock.engines.embedded.decoder import Shape
from penstock.engines.embedded.prefix import Cached

FIRST = 8
"""Tokens that a fresh tail holds; the room doubles as replies grow."""


class Tails:
    """Room for `slots` tails."""

    def __init__(self, shape: Shape, *, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._slots = shape, slots
        self._device, self._dtype = device, dtype
        self.clear()

    def clear(self) -> None:
        """Back to fresh, zeroed memory: what weights of long ago computed, NaNs included, must not linger in masked places."""
        self._allocate(FIRST)

    def reserve(self, tokens: int) -> None:
        """Make every tail at least `tokens` long."""
        if tokens <= self.capacity:
            return
        keys, values, old = self.keys, self.values, self.capacity
        capacity = old
        while capacity < tokens:
            capacity *= 2
        self._allocate(capacity)
        self.keys[..., :old].copy_(keys)
        self.values[..., :old, :].copy_(values)

    def load(self, slot: int, at: int, cached: Cached) -> None:
        """Put tokens computed elsewhere at `at` of a tail."""
        end = at + cached.keys.shape[-1]
        self.reserve(end)
        self.keys[:, slot, :, :, at:end].copy_(cached.keys)
        self.values[:, slot, :, at:end].copy_(cached.values)

    def read(self, slot: int, start: int, end: int) -> Cached:
        """A view of some of a tail's tokens."""
        return Cached(self.keys[:, slot, :, :, start:end], self.values[:, slot, :, start:end])

    def _allocate(self, capacity: int) -> None:
        shape = self._shape
        size = (shape.layers, self._slots, shape.kv_heads)
        self.capacity = capacity
        self.keys = torch.zeros(*size, shape.head_dim, capacity, device=self._device, dtype=self._dtype)
        self.values = torch.zeros(*size, capacity, shape.head_dim, device=self._device, dtype=self._dtype)
