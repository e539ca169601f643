"""Key-value cache of the embedded engine: a tree of token prefixes, shared by requests, and a tail for each request.

A segment of the tree holds the tokens between two forks, so every prompt is a path from a root and a common prefix is stored
once. Each adapter has its own root, as it makes other keys and values of the same tokens. A segment without keys and values
is planned: some request needs it, and the next prefill pass computes it. Segments that no request holds are kept for later
requests and dropped, least recently used first, when room is needed. A tail holds the newest tokens of one running request.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engines.embedded.decoder import DecoderShape

NO_ADAPTER = -1
"""In place of an adapter: the base model alone."""


class KeyValues(NamedTuple):
    """Keys and values of consecutive tokens, for all layers."""

    keys: Tensor
    """[layers, kv_heads, dim, tokens]: transposed, as the product with queries reads them."""
    values: Tensor
    """[layers, kv_heads, tokens, dim]"""

    def part(self, start: int, end: int) -> "KeyValues":
        """A copy of some of the tokens: a view would keep the memory of all of them."""
        return KeyValues(self.keys[..., start:end].clone(), self.values[..., start:end, :].clone())


class CacheRows(NamedTuple):
    """Where a paged cache has the keys and values of consecutive tokens."""

    rows: NDArray[np.int32]

    def part(self, start: int, end: int) -> "CacheRows":
        return CacheRows(self.rows[start:end])


class Segment:
    """Consecutive tokens of a path."""

    def __init__(self, tokens: tuple[int, ...], parent: "Segment | None", start: int, adapter: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.adapter = adapter
        self.start = start
        """Position of its first token."""
        self.children: dict[int, Segment] = {}
        """By their first token."""
        self.holders = 0
        """Requests whose path ends here; a segment with holders or children stays."""
        self.used = 0
        self.kv: KeyValues | CacheRows | None = None
        """None while planned."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)

    @property
    def ready(self) -> bool:
        """Whether its keys and values are computed; those of the root are."""
        return self.kv is not None or self.parent is None

    def path(self) -> "list[Segment]":
        """The segments from below the root down to this one."""
        found: list[Segment] = []
        segment: Segment = self
        while segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]


class PrefixTree:
    """The segments, which hold at most `capacity` tokens together.

    A segment has at most `longest` tokens, so that it can be computed in a single pass.
    """

    def __init__(self, *, capacity: int, longest: int) -> None:
        self.capacity, self.longest = capacity, longest
        self.clear()

    def clear(self) -> None:
        """Drop everything. Segments that requests hold are no longer part of the tree."""
        self.root = Segment((), None, 0, NO_ADAPTER)
        self._roots = {NO_ADAPTER: self.root}
        self.tokens = 0
        self._clock = 0
        self._unheld: list[tuple[int, int, Segment]] = []
        """A heap of all free segments by their last use, and of entries that no longer hold."""
        self._unheld_limit = 1024

    def plan(self, tokens: Sequence[int], adapter: int = NO_ADAPTER) -> Segment | None:
        """Return the end of the path for `tokens`, held for the caller; missing segments are planned. None if there is no room."""
        return self._hold_path(self._root(adapter), tokens)

    def drop(self, adapter: int) -> None:
        """Remove all that was computed with an adapter. No request may hold it."""
        segments = [self._root(adapter)]
        for segment in segments:
            segments += segment.children.values()
        for segment in reversed(segments[1:]):
            self._remove(segment)

    def extend(self, held: Segment, tokens: Sequence[int], kv: KeyValues | CacheRows) -> Segment | None:
        """Store a copy of computed `tokens` below `held` and move the hold to their end; None, and no change, without room."""
        last = self._hold_path(held, tokens)
        if last is None:
            return None
        for segment in last.path():
            if not segment.ready:
                segment.kv = kv.part(segment.start - held.end, segment.end - held.end)
        self.release(held)
        return last

    def release(self, segment: Segment) -> None:
        """Give up the hold on a path. Planned segments that no other request needs are removed at once."""
        segment.holders -= 1
        while not segment.ready and _is_free(segment):
            segment = self._remove(segment)
        self._offer(segment)

    def _root(self, adapter: int) -> Segment:
        return self._roots.setdefault(adapter, Segment((), None, 0, adapter))

    def _hold_path(self, start: Segment, tokens: Sequence[int]) -> Segment | None:
        last, matched = self._match(start, tokens)
        self._hold(last)  # before room is made, which removes segments that nobody holds
        if not self.make_room(len(tokens) - matched):
            self.release(last)
            return None
        end = self._grow(last, tokens[matched:])
        self._hold(end)
        last.holders -= 1
        return end

    def _match(self, last: Segment, tokens: Sequence[int]) -> tuple[Segment, int]:
        """The deepest segment below `last` on the path of `tokens`, split if they leave it midway; how many tokens match."""
        matched = 0
        while matched < len(tokens) and (child := last.children.get(tokens[matched])) is not None:
            common = _common_length(child.tokens, tokens, matched)
            last = self._split(child, common) if common < len(child.tokens) else child
            matched += common
            if last is not child:
                break
        return last, matched

    def _grow(self, last: Segment, tokens: Sequence[int]) -> Segment:
        for a in range(0, len(tokens), self.longest):
            piece = tuple(tokens[a : a + self.longest])
            last.children[piece[0]] = child = Segment(piece, last, last.end, last.adapter)
            self.tokens += len(piece)
            last = child
        return last

    def _split(self, lower: Segment, at: int) -> Segment:
        """Split a segment and return the upper part. `lower` itself stays the lower part, so that holds on it remain valid."""
        upper = Segment(lower.tokens[:at], lower.parent, lower.start, lower.adapter)
        upper.used = lower.used
        if lower.kv is not None:
            upper.kv, lower.kv = lower.kv.part(0, at), lower.kv.part(at, len(lower.tokens))
        if lower.parent is not None:
            lower.parent.children[upper.tokens[0]] = upper
        lower.tokens, lower.parent, lower.start = lower.tokens[at:], upper, upper.end
        upper.children[lower.tokens[0]] = lower
        return upper

    def _hold(self, segment: Segment) -> None:
        segment.holders += 1
        self._clock += 1
        for part in segment.path():
            part.used = self._clock

    def make_room(self, tokens: int) -> bool:
        """Drop what nobody holds until `tokens` more fit; False if they never will."""
        while self.tokens + tokens > self.capacity and self._unheld:
            entry = heapq.heappop(self._unheld)
            if self._holds(entry):
                self._offer(self._remove(entry[2]))
        return self.tokens + tokens <= self.capacity

    def _offer(self, segment: Segment) -> None:
        """Note that a segment may be dropped, if it is free."""
        if not _is_free(segment):
            return
        heapq.heappush(self._unheld, (segment.used, id(segment), segment))
        if len(self._unheld) > self._unheld_limit:
            self._unheld = [entry for entry in self._unheld if self._holds(entry)]
            heapq.heapify(self._unheld)
            self._unheld_limit = 1024 + 2 * len(self._unheld)

    def _holds(self, entry: tuple[int, int, Segment]) -> bool:
        """Whether the segment is still part of the tree, free, and was not used since."""
        used, _, segment = entry
        there = segment.parent is not None and segment.parent.children.get(segment.tokens[0]) is segment
        return there and _is_free(segment) and segment.used == used

    def _remove(self, segment: Segment) -> Segment:
        parent = segment.parent
        assert parent is not None  # the root is never free
        del parent.children[segment.tokens[0]]
        self.tokens -= len(segment.tokens)
        return parent


def _is_free(segment: Segment) -> bool:
    return not segment.children and segment.holders == 0 and segment.parent is not None


def _common_length(tokens: tuple[int, ...], other: Sequence[int], offset: int) -> int:
    """How many leading tokens equal `other` from `offset` on."""
    length = min(len(tokens), len(other) - offset)
    if tuple(other[offset : offset + length]) == tokens[:length]:
        return length
    return next(i for i in range(length) if tokens[i] != other[offset + i])


FIRST_CAPACITY = 8
"""Tokens that a new tail holds; the capacity doubles as replies grow."""


class TailCache:
    """One tail per slot, all in the same two tensors."""

    def __init__(self, shape: DecoderShape, *, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._slots = shape, slots
        self._device, self._dtype = device, dtype
        self.clear()

    def clear(self) -> None:
        """Allocate zeroed memory: NaNs that broken weights left at masked positions would spread, since 0 * NaN is NaN."""
        self._allocate(FIRST_CAPACITY)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in every tail."""
        if tokens <= self.capacity:
            return
        keys, values, old = self.keys, self.values, self.capacity
        capacity = old
        while capacity < tokens:
            capacity *= 2
        self._allocate(capacity)
        self.keys[..., :old].copy_(keys)
        self.values[..., :old, :].copy_(values)

    def load(self, slot: int, at: int, kv: KeyValues) -> None:
        """Copy computed tokens to position `at` of a tail."""
        end = at + kv.keys.shape[-1]
        self.reserve(end)
        self.keys[:, slot, :, :, at:end].copy_(kv.keys)
        self.values[:, slot, :, at:end].copy_(kv.values)

    def read(self, slot: int, start: int, end: int) -> KeyValues:
        """A view of a tail's tokens."""
        return KeyValues(self.keys[:, slot, :, :, start:end], self.values[:, slot, :, start:end])

    def _allocate(self, capacity: int) -> None:
        shape = self._shape
        size = (shape.layers, self._slots, shape.kv_heads)
        self.capacity = capacity
        self.keys = torch.zeros(*size, shape.head_dim, capacity, device=self._device, dtype=self._dtype)
        self.values = torch.zeros(*size, capacity, shape.head_dim, device=self._device, dtype=self._dtype)
