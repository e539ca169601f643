"""What the engine remembers of token prefixes: a tree of segments, each with its keys and values, computed and kept once.

A segment holds the tokens between two forks, so every prompt is a path from the root and what prompts share is stored once. A
segment without keys and values is planned: some request needs it, and the next prefill pass computes it. Segments that no
request holds are kept for later ones and dropped, least recently used first, when room is needed.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engines.embedded.decoder import DecoderShape


class KeyValues(NamedTuple):
    """Keys and values of some consecutive tokens, all layers."""

    keys: Tensor
    """[layers, kv_heads, dim, tokens]: transposed, see `tails`."""
    values: Tensor
    """[layers, kv_heads, tokens, dim]"""

    def part(self, start: int, end: int) -> "KeyValues":
        """A copy of some of the tokens, so that dropping one part frees its memory."""
        return KeyValues(self.keys[..., start:end].clone(), self.values[..., start:end, :].clone())


class Segment:
    """Some consecutive tokens of a path."""

    def __init__(self, tokens: tuple[int, ...], parent: "Segment | None", start: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.start = start
        """Position of its first token."""
        self.children: dict[int, Segment] = {}
        """By first token."""
        self.holders = 0
        """Requests whose path ends here; a segment with holders or children stays."""
        self.used = 0
        self.cached: KeyValues | None = None
        """None while planned."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)

    @property
    def ready(self) -> bool:
        """Whether its keys and values are known."""
        return self.cached is not None or self.parent is None

    def path(self) -> "list[Segment]":
        """From below the root down to this one."""
        found: list[Segment] = []
        segment: Segment = self
        while segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]


class PrefixTree:
    """The segments, and the bound on how many tokens they may hold together.

    `longest` bounds one segment, so that each can be computed in a single pass.
    """

    def __init__(self, *, capacity: int, longest: int) -> None:
        self.capacity, self.longest = capacity, longest
        self.clear()

    def clear(self) -> None:
        """Forget everything. Whoever held a segment must take a new one."""
        self.root = Segment((), None, 0)
        self.tokens = 0
        self._clock = 0

    def plan(self, tokens: Sequence[int]) -> Segment | None:
        """The end of the path for `tokens`, held for the caller; what is not there yet is planned. None where there is no room."""
        last, matched = self._match(self.root, tokens)
        self._hold(last)
        if not self._make_room(len(tokens) - matched):
            self.release(last)
            return None
        return self._move_hold(last, self._grow(last, tokens[matched:]))

    def extend(self, held: Segment, tokens: Sequence[int], cached: KeyValues) -> Segment | None:
        """Keep a copy of computed `tokens` below `held`, whose hold moves to their end; None, and nothing moved, without room."""
        last, matched = self._match(held, tokens)
        self._hold(last)
        if not self._make_room(len(tokens) - matched):
            self.release(last)
            return None
        last = self._move_hold(last, self._grow(last, tokens[matched:]))
        for segment in last.path():
            if not segment.ready:
                segment.cached = cached.part(segment.start - held.end, segment.end - held.end)
        self.release(held)
        return last

    def release(self, segment: Segment) -> None:
        """Let go of a path. What nobody computed and nobody else needs is gone at once."""
        segment.holders -= 1
        while not segment.ready and _free(segment):
            segment = self._remove(segment)

    def _match(self, last: Segment, tokens: Sequence[int]) -> tuple[Segment, int]:
        """The deepest segment below `last` on the way of `tokens`, split where they leave it, and how many tokens lead there."""
        matched = 0
        while matched < len(tokens) and (child := last.children.get(tokens[matched])) is not None:
            common = _common(child.tokens, tokens, matched)
            last = self._split(child, common) if common < len(child.tokens) else child
            matched += common
            if last is not child:
                break
        return last, matched

    def _grow(self, last: Segment, tokens: Sequence[int]) -> Segment:
        for a in range(0, len(tokens), self.longest):
            piece = tuple(tokens[a : a + self.longest])
            last.children[piece[0]] = child = Segment(piece, last, last.end)
            self.tokens += len(piece)
            last = child
        return last

    def _split(self, lower: Segment, at: int) -> Segment:
        """Cut `lower` in two; it stays the lower part, so that those who hold it need not know. Returns the upper part."""
        upper = Segment(lower.tokens[:at], lower.parent, lower.start)
        upper.used = lower.used
        if lower.cached is not None:
            upper.cached, lower.cached = lower.cached.part(0, at), lower.cached.part(at, len(lower.tokens))
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

    def _move_hold(self, old: Segment, new: Segment) -> Segment:
        self._hold(new)
        old.holders -= 1
        return new

    def _make_room(self, tokens: int) -> bool:
        excess = self.tokens + tokens - self.capacity
        if excess <= 0:
            return True
        heap = [(s.used, id(s), s) for s in self._walk() if _free(s)]
        heapq.heapify(heap)
        while heap and excess > 0:
            segment = heapq.heappop(heap)[2]
            excess -= len(segment.tokens)
            parent = self._remove(segment)
            if _free(parent):
                heapq.heappush(heap, (parent.used, id(parent), parent))
        return excess <= 0

    def _remove(self, segment: Segment) -> Segment:
        parent = segment.parent
        assert parent is not None  # the root is never free
        del parent.children[segment.tokens[0]]
        self.tokens -= len(segment.tokens)
        return parent

    def _walk(self) -> Iterator[Segment]:
        ahead = [self.root]
        while ahead:
            segment = ahead.pop()
            yield segment
            ahead.extend(segment.children.values())


def _free(segment: Segment) -> bool:
    return not segment.children and segment.holders == 0 and segment.parent is not None


def _common(tokens: tuple[int, ...], other: Sequence[int], offset: int) -> int:
    """How many of `tokens` equal `other` from `offset` on."""
    length = min(len(tokens), len(other) - offset)
    if tuple(other[offset : offset + length]) == tokens[:length]:
        return length
    return next(i for i in range(length) if tokens[i] != other[offset + i])


FIRST_CAPACITY = 8
"""Tokens that a fresh tail holds; the room doubles as replies grow."""


class TailCache:
    """Room for `slots` tails."""

    def __init__(self, shape: DecoderShape, *, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._slots = shape, slots
        self._device, self._dtype = device, dtype
        self.clear()

    def clear(self) -> None:
        """Back to fresh, zeroed memory: what weights of long ago computed, NaNs included, must not linger in masked places."""
        self._allocate(FIRST_CAPACITY)

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

    def load(self, slot: int, at: int, cached: KeyValues) -> None:
        """Put tokens computed elsewhere at `at` of a tail."""
        end = at + cached.keys.shape[-1]
        self.reserve(end)
        self.keys[:, slot, :, :, at:end].copy_(cached.keys)
        self.values[:, slot, :, at:end].copy_(cached.values)

    def read(self, slot: int, start: int, end: int) -> KeyValues:
        """A view of some of a tail's tokens."""
        return KeyValues(self.keys[:, slot, :, :, start:end], self.values[:, slot, :, start:end])

    def _allocate(self, capacity: int) -> None:
        shape = self._shape
        size = (shape.layers, self._slots, shape.kv_heads)
        self.capacity = capacity
        self.keys = torch.zeros(*size, shape.head_dim, capacity, device=self._device, dtype=self._dtype)
        self.values = torch.zeros(*size, capacity, shape.head_dim, device=self._device, dtype=self._dtype)
