"""Attention of the embedded engine: prefill of new segments, and decode steps over shared segments and tails.

Every segment is read once for all requests below it: their queries are one matrix. Sums stay in float32, whatever precision the
cache has.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engines.embedded.decoder import DecoderShape
from penstock.engines.embedded.kv_cache import KeyValues, Segment, TailCache


class SegmentSpan(NamedTuple):
    """A segment and the packed tokens that attend to it: `first` up to, not including, `last`."""

    segment: Segment
    first: int
    last: int


def shared_spans(paths: Sequence[Sequence[Segment]], lengths: Sequence[int]) -> list[SegmentSpan]:
    """Which tokens attend to which segment. Row i has `lengths[i]` tokens; rows with a common prefix must be neighbours."""
    spans: list[SegmentSpan] = []
    open_spans: list[SegmentSpan] = []
    at = 0
    for path, length in zip(paths, lengths, strict=True):
        kept = 0
        while kept < min(len(path), len(open_spans)) and open_spans[kept].segment is path[kept]:
            kept += 1
        spans += [span._replace(last=at) for span in open_spans[kept:]]
        open_spans = open_spans[:kept] + [SegmentSpan(segment, at, at) for segment in path[kept:]]
        at += length
    return spans + [span._replace(last=at) for span in open_spans]


class SegmentAttention:
    """Attention of packed queries to the segments above them."""

    def __init__(self, shape: DecoderShape, spans: Sequence[SegmentSpan]) -> None:
        self.group = shape.heads // shape.kv_heads
        self.scale = shape.head_dim**-0.5
        self._spans = [(s.segment.kv, s.first * self.group, s.last * self.group, s.segment.start, s.segment.end) for s in spans]

    def score(self, layer: int, queries: Tensor, scores: Tensor) -> None:
        """Write the columns of `scores` [kv_heads, tokens * group, columns] that belong to segments."""
        for kv, a, b, start, end in self._spans:
            assert isinstance(kv, KeyValues)
            put_product(scores[:, a:b, start:end], queries[:, a:b], kv.keys[layer], self.scale)

    def mix(self, layer: int, weights: Tensor, mixed: Tensor) -> None:
        """Add the segments' values, times `weights`, to `mixed` [kv_heads, tokens * group, dim]."""
        for kv, a, b, start, end in self._spans:
            assert isinstance(kv, KeyValues)
            add_product(mixed[:, a:b], weights[:, a:b, start:end], kv.values[layer])


class PrefillAttention:
    """`attend` of a pass that computes planned segments, whose ancestors are all computed, and keeps their keys and values."""

    def __init__(self, shape: DecoderShape, segments: Sequence[Segment], *, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._planned = shape, segments
        lengths = [len(segment.tokens) for segment in segments]
        self._ancestors = SegmentAttention(shape, shared_spans([segment.path()[:-1] for segment in segments], lengths))
        size = (shape.kv_heads, sum(lengths) * self._ancestors.group, max(segment.end for segment in segments))
        self._scores = torch.full(size, -torch.inf, device=device)
        self._weights = torch.empty_like(self._scores)
        self._later = torch.ones(max(lengths), max(lengths), dtype=torch.bool, device=device).triu(1)[:, None]  # [time, 1, time]
        self._computed = [_empty(shape, length, device, dtype) for length in lengths]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, tokens, dim], k and v [1, kv_heads, tokens, dim] → [1, heads, tokens, dim]."""
        queries = _grouped(q, self._shape)
        self._ancestors.score(layer, queries, self._scores)
        group, at = self._ancestors.group, 0
        for segment, kv in zip(self._planned, self._computed, strict=True):
            time = len(segment.tokens)
            rows = slice(at * group, (at + time) * group)
            kv.keys[layer].copy_(k[0, :, at : at + time].transpose(1, 2))
            kv.values[layer].copy_(v[0, :, at : at + time])
            own = self._scores[:, rows, segment.start : segment.end]
            put_product(own, queries[:, rows], kv.keys[layer], self._ancestors.scale)
            own.unflatten(1, [time, group]).masked_fill_(self._later[:time, :, :time], -torch.inf)
            at += time
        torch.softmax(self._scores, -1, out=self._weights)
        return self._mix(layer, queries)

    def _mix(self, layer: int, queries: Tensor) -> Tensor:
        mixed = torch.zeros(queries.shape, device=queries.device)
        self._ancestors.mix(layer, self._weights, mixed)
        at = 0
        for segment, kv in zip(self._planned, self._computed, strict=True):
            rows = slice(at * self._ancestors.group, (at + len(segment.tokens)) * self._ancestors.group)
            add_product(mixed[:, rows], self._weights[:, rows, segment.start : segment.end], kv.values[layer])
            at += len(segment.tokens)
        return _ungrouped(mixed, self._shape).to(queries.dtype)

    def commit(self) -> None:
        """After the last layer: hand the keys and values to the segments."""
        for segment, kv in zip(self._planned, self._computed, strict=True):
            segment.kv = kv


class DecodeAttention:
    """`attend` of decode steps over the same rows: one new token per row, written to its tail.

    Tails are read as one range of slots from the first to the last, idle ones included, because selecting rows would copy them.
    Only if most of the range is idle are the rows selected.
    """

    def __init__(self, shape: DecoderShape, tails: TailCache, slots: Sequence[int], paths: Sequence[Sequence[Segment]]) -> None:
        self._shape, self._tails, self._slots = shape, tails, list(slots)
        self._ancestors = SegmentAttention(shape, shared_spans(paths, [1] * len(paths)))
        self._columns = max((path[-1].end for path in paths if path), default=0)
        device = tails.keys.device
        self._index = torch.tensor(self._slots, device=device)
        first, last = min(slots), max(slots) + 1
        self._dense = 2 * len(slots) >= last - first
        self._range = slice(first, last)
        rows = {slot: row for row, slot in enumerate(slots)}
        self._row_of_slot: Tensor | None = None
        self._slot_of_row: Tensor | None = None
        if self._dense and self._slots != list(range(first, last)):
            self._row_of_slot = torch.tensor([rows.get(slot, 0) for slot in range(first, last)], device=device)
            self._slot_of_row = self._index - first

    def begin(self, lengths: Sequence[int]) -> None:
        """Prepare a step in which row i's tail already holds `lengths[i]` tokens."""
        width, rows, shape = max(lengths) + 1, len(lengths), self._shape
        self._tails.reserve(width)
        keys, values = self._tails.keys, self._tails.values
        device = keys.device
        self._at = torch.tensor(lengths, device=device)
        self._keys, self._values = keys.unbind(0), values.unbind(0)
        if self._dense:
            self._read_keys = keys[:, self._range, :, :, :width].flatten(1, 2).unbind(0)  # per layer [slots * kv_heads, dim, width]
            self._read_values = values[:, self._range, :, :width].flatten(1, 2).unbind(0)
        in_slots = self._at if self._row_of_slot is None else self._at[self._row_of_slot]
        seen = torch.arange(width, device=device) <= in_slots[:, None]
        mask = torch.where(seen, 0.0, -torch.inf)[:, None, None]
        self._mask = mask.expand(-1, shape.kv_heads, 1, -1).reshape(-1, 1, width)  # [slots * kv_heads, 1, width]
        size = (shape.kv_heads, rows * self._ancestors.group, self._columns + width)
        self._scores = torch.full(size, -torch.inf, device=device)
        self._weights = torch.empty_like(self._scores)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, rows, dim], k and v [1, kv_heads, rows, dim] → [1, heads, rows, dim]."""
        self._keys[layer][self._index, :, :, self._at] = k[0].transpose(0, 1)
        self._values[layer][self._index, :, self._at] = v[0].transpose(0, 1)
        shape, rows, group = self._shape, len(self._slots), self._ancestors.group
        tail_keys, tail_values = self._read_tails(layer)
        by_row = q.view(shape.kv_heads, group, rows, shape.head_dim).permute(2, 0, 1, 3)  # [rows, kv_heads, group, dim]
        scores = plus_product(self._mask, _in_slots(by_row, self._row_of_slot), tail_keys, self._ancestors.scale)
        scores = _in_rows(scores, self._slot_of_row, shape.kv_heads)  # [rows, kv_heads, group, width]
        per_row = self._scores.view(shape.kv_heads, rows, group, -1)
        per_row[..., self._columns :] = scores.transpose(0, 1)
        self._ancestors.score(layer, _grouped(q, shape), self._scores)
        torch.softmax(self._scores, -1, out=self._weights)
        weights = self._weights.view(shape.kv_heads, rows, group, -1)[..., self._columns :].transpose(0, 1)
        mixed = product(_in_slots(weights, self._row_of_slot), tail_values)
        mixed = _in_rows(mixed, self._slot_of_row, shape.kv_heads).transpose(0, 1).reshape(shape.kv_heads, rows * group, -1)
        self._ancestors.mix(layer, self._weights, mixed)
        return _ungrouped(mixed, shape).to(q.dtype)

    def _read_tails(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [slots * kv_heads, dim, width] and values [slots * kv_heads, width, dim] of the slots that are read."""
        if self._dense:
            return self._read_keys[layer], self._read_values[layer]
        width = self._mask.shape[-1]
        keys, values = self._keys[layer][..., :width], self._values[layer][:, :, :width]
        return keys[self._index].flatten(0, 1), values[self._index].flatten(0, 1)


def _in_slots(by_row: Tensor, row_of_slot: Tensor | None) -> Tensor:
    """[rows, kv_heads, …] → [slots * kv_heads, …]."""
    return (by_row if row_of_slot is None else by_row[row_of_slot]).flatten(0, 1)


def _in_rows(by_slot: Tensor, slot_of_row: Tensor | None, kv_heads: int) -> Tensor:
    """[slots * kv_heads, …] → [rows, kv_heads, …]."""
    by_slot = by_slot.view(-1, kv_heads, *by_slot.shape[1:])
    return by_slot if slot_of_row is None else by_slot[slot_of_row]


def _grouped(q: Tensor, shape: DecoderShape) -> Tensor:
    """[1, heads, tokens, dim] → [kv_heads, tokens * group, dim]."""
    return q.view(shape.kv_heads, -1, q.shape[2], shape.head_dim).transpose(1, 2).flatten(1, 2)


def _ungrouped(mixed: Tensor, shape: DecoderShape) -> Tensor:
    """[kv_heads, tokens * group, dim] → [1, heads, tokens, dim], tokens outermost in memory, as the next projection reads them."""
    group = shape.heads // shape.kv_heads
    return mixed.view(shape.kv_heads, -1, group, shape.head_dim).transpose(0, 1).flatten(1, 2).transpose(0, 1)[None]


def _empty(shape: DecoderShape, tokens: int, device: torch.device, dtype: torch.dtype) -> KeyValues:
    keys = torch.empty(shape.layers, shape.kv_heads, shape.head_dim, tokens, device=device, dtype=dtype)
    return KeyValues(keys, torch.empty(shape.layers, shape.kv_heads, tokens, shape.head_dim, device=device, dtype=dtype))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    if b.dtype == torch.float32:
        return torch.bmm(a, b)
    if b.is_cuda:  # tensor cores; their float32 sum is returned before it would be rounded
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def plus_product(first: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """first + scale * a @ b, in float32. `first` may be broadcast."""
    if b.dtype == torch.float32:
        return torch.baddbmm(first, a, b, alpha=scale)
    return product(a, b).mul_(scale).add_(first)


def put_product(into: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """into = scale * a @ b, where `into` is float32. A product with strided output would run head by head."""
    torch.mul(product(a, b), scale, out=into)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, where `into` is float32."""
    if b.dtype == torch.float32 and into.is_contiguous():
        into.baddbmm_(a, b)
    else:
        into += product(a, b)
