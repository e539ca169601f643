"""The forward pass of training on a GPU: one attention kernel for all rows of a pass, compiled layers, checkpoints where needed.

Attention over the prefix tree has two forms. `TreeMask`: a pass lays out its tree depth first (see `batches.py`), so the
queries that read a key lie side by side; two numbers per key describe the tree, and query q reads key k if first[k] <= q <
end[k]. `PathMask`: each path from the root to a leaf is copied out and attends alone by plain causal attention. Where paths
share little but their prompt, as rollouts of many turns do, this wastes little, and a GPU's own causal attention is faster than
any kernel with a mask.

Logits exist for one chunk of hidden states, in the decoder's precision; sums over the vocabulary are in float32. A chunk has *rows*
(a hidden state at a temperature), *pairs* (a row and a token it predicts) and *terms* (see `LossTerm`): several may share a pair.

The eager path in `forward.py` computes the same and is the oracle for this one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from penstock.engines.embedded.decoder import Decoder, DecoderLayer, rotate
from penstock.engines.token_sets import unpack_sets
from penstock.train.batches import LossTerms, Pass, PassRow
from penstock.train.device import compile_once, to_device
from penstock.train.forward import FORBIDDEN, KeysValues, ScoredTerms

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
    ]  # else another path continues from its end


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


class ScoredChunk(NamedTuple):
    """Consecutive rows of a pass with their pairs and terms, on the device."""

    rows: slice
    """Among the rows of the pass."""
    inverse: Tensor
    """[rows]: 1 / temperature."""
    pair_rows: Tensor
    """[pairs]: the row of each, counted from the chunk's first."""
    targets: Tensor
    """[pairs]"""
    term_pairs: Tensor
    """[terms]: the pair of each, counted from the chunk's first."""
    behaviour: Tensor
    """[terms], as the next two: those of `LossTerm`, weights in float64."""
    advantages: Tensor
    weights: Tensor
    allowed: Tensor | None = None
    """[rows, vocab]: the tokens that may be chosen; None if no row has a limit."""


class TermTable:
    """The terms of a pass as tensors on the device, in the order of `Pass.terms`: by place, temperature, then set of tokens."""

    def __init__(self, terms: LossTerms, device: torch.device, allowed: Sequence[bytes] = ()) -> None:
        """`allowed` are the sets of `Pass.allowed`."""
        at, target, temperature = terms.at, terms.target, terms.temperature.astype(np.float32)
        new = np.ones(len(terms), bool)
        new[1:] = (at[1:] != at[:-1]) | (temperature[1:] != temperature[:-1]) | (terms.allowed[1:] != terms.allowed[:-1])
        row = np.cumsum(new) - 1
        pairs, term_pair = np.unique(row << 32 | target, return_inverse=True)
        self._term_rows, self._pair_rows = row, pairs >> 32
        self.places = to_device(at[new], device)
        """[rows]: the index of the row's hidden state in the pass."""
        self._inverse = to_device(1.0 / temperature[new], device)
        self._pairs = to_device(np.stack((pairs >> 32, pairs & 0xFFFFFFFF)), device)
        self._term_pair = to_device(term_pair.astype(np.int64), device)
        self._device, self._sets, self._row_sets = device, allowed, terms.allowed[new]
        self._columns = to_device(np.stack((terms.logprob, terms.advantage, terms.weight)), device)

    def chunks(self, limit: int, vocab_size: int) -> Iterator[ScoredChunk]:
        """Yields chunks of at most `limit` rows."""
        count = len(self.places)
        for start in range(0, count, limit):
            stop = min(start + limit, count)
            pairs = slice(*np.searchsorted(self._pair_rows, (start, stop)).tolist())
            terms = slice(*np.searchsorted(self._term_rows, (start, stop)).tolist())
            yield ScoredChunk(
                slice(start, stop),
                self._inverse[start:stop],
                self._pairs[0, pairs] - start,
                self._pairs[1, pairs],
                self._term_pair[terms] - pairs.start,
                self._columns[0, terms].float(),
                self._columns[1, terms].float(),
                self._columns[2, terms],
                self._allowed(self._row_sets[start:stop].tolist(), vocab_size),
            )

    def _allowed(self, rows: list[int], vocab_size: int) -> Tensor | None:
        """Unpacked for one chunk at a time, as its logits are."""
        if max(rows) < 0:
            return None
        return to_device(unpack_sets([b"" if at < 0 else self._sets[at] for at in rows], vocab_size), self._device)


def score(
    states: Tensor, weight: Tensor, chunk: ScoredChunk, *, compiled: bool, entropy_slopes: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies, each [terms]. states [rows, hidden], weight [vocab, hidden].

    Entropies have a gradient if `entropy_slopes`.
    """
    given = (states, weight, chunk.inverse, chunk.pair_rows, chunk.targets, chunk.allowed, compiled, entropy_slopes)
    logprobs, entropy = cast(tuple[Tensor, Tensor], _PairScores.apply(*given))
    return logprobs[chunk.term_pairs], entropy[chunk.pair_rows][chunk.term_pairs]


class _PairScores(torch.autograd.Function):
    """Log-probabilities of pairs and entropies of rows. Keeps the logits for the backward pass and overwrites them there."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        inverse: Tensor,
        rows: Tensor,
        targets: Tensor,
        allowed: Tensor | None,
        compiled: bool,
        entropy_slopes: bool,
    ) -> Any:
        logits = states @ weight.t()
        if allowed is not None:  # the slopes of the others are then 0
            logits.masked_fill_(~allowed, FORBIDDEN)
        statistics = compile_once(_statistics) if compiled else _statistics
        total, entropy = statistics(logits, inverse)
        logprobs = logits[rows, targets].float() * inverse[rows] - total[rows]
        ctx.save_for_backward(states, weight, inverse, rows, targets, logits, total, logprobs, entropy)
        ctx.compiled, ctx.entropy_slopes = compiled, entropy_slopes
        if not entropy_slopes:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gradient: Tensor = grad_outputs[0]
        states, weight, inverse, rows, targets, logits, total, logprobs, entropy = ctx.saved_tensors
        per_row = torch.zeros_like(inverse).index_add_(0, rows, gradient)
        # In float32, as a likely token's slope is the small difference of two large numbers.
        own = gradient - logprobs.exp() * per_row[rows]
        if ctx.entropy_slopes:
            spread: Tensor = grad_outputs[1]
            slope = compile_once(_slope_with_entropy) if ctx.compiled else _slope_with_entropy
            slopes = slope(logits, inverse, total, per_row, entropy, spread)
            own -= spread[rows] * logprobs.exp() * (logprobs + entropy[rows])
        else:
            slope = compile_once(_slope) if ctx.compiled else _slope
            slopes = slope(logits, inverse, total, per_row)
        own *= inverse[rows]
        slopes[rows, targets] = own.to(slopes.dtype)
        trained = slopes.t() @ states if ctx.needs_input_grad[1] else None  # the head is not, where an adapter is
        return slopes @ weight, trained, None, None, None, None, None, None


def _statistics(logits: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logarithm of the sum of exponentials, and the entropy, each [rows] in float32."""
    scaled = logits.float() * inverse.unsqueeze(1)
    total = scaled.logsumexp(1)
    return total, total - ((scaled - total.unsqueeze(1)).exp() * scaled).sum(1)


def _slope(logits: Tensor, inverse: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    """Returns the slope of each logit through the sums alone, [rows, vocab] in the logits' precision."""
    scaled = logits.float() * inverse.unsqueeze(1)
    return ((scaled - total.unsqueeze(1)).exp() * (-gradient * inverse).unsqueeze(1)).to(logits.dtype)


def _slope_with_entropy(
    logits: Tensor, inverse: Tensor, total: Tensor, gradient: Tensor, entropy: Tensor, spread: Tensor
) -> Tensor:
    """As `_slope`, with that of the entropies, whose gradient is `spread` [rows]."""
    logprobs = logits.float() * inverse.unsqueeze(1) - total.unsqueeze(1)
    falling = gradient.unsqueeze(1) + spread.unsqueeze(1) * (logprobs + entropy.unsqueeze(1))
    return (-logprobs.exp() * falling * inverse.unsqueeze(1)).to(logits.dtype)


Mask = PathMask | BlockMask | Tensor
"""The last is dense, for layers that are not compiled: [queries, keys], True where the token reads the key."""


WHOLE_BLOCKS: Any = {"IS_DIVISIBLE": True}
"""All lengths are multiples of `BLOCK`: flex attention need not check indices, as it does if lengths may change."""


class TreeForward:
    """A `PassForward` for GPUs."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        compiled: bool,
        logits_rows: int,
        checkpointed: Callable[[int], int],
        entropy_slopes: bool = False,
        states: bool = False,
    ) -> None:
        """In the backward pass, a pass of n tokens computes `checkpointed(n)` layers again instead of keeping them in memory.

        `entropy_slopes`: entropies have a gradient. `states`: hidden states are given with the terms.
        """
        self.decoder, self.compiled, self._entropy_slopes, self._states = decoder, compiled, entropy_slopes, states
        self._logits_rows, self._checkpointed = logits_rows, checkpointed

    def trunk_states(self, ids: Sequence[int]) -> KeysValues:
        if not ids:
            return []
        kept: KeysValues = []
        rows = (PassRow(start=0, stop=len(ids)),)
        self._run(Pass(ids=tuple(ids), positions=tuple(range(len(ids))), rows=rows), [], 0, kept)
        return kept

    def scored(self, one: Pass, trunk: KeysValues, length: int) -> Iterator[ScoredTerms]:
        decoder, hidden = self.decoder, self._run(one, trunk, length, None)
        table = TermTable(one.terms, decoder.device, one.allowed)  # while the GPU computes
        states = hidden[table.places]
        weight = decoder.embed.weight if decoder.head is None else decoder.head.weight
        gradients: list[Tensor] = []
        for chunk in table.chunks(self._logits_rows, decoder.shape.vocab_size):
            piece = states[chunk.rows].detach().requires_grad_()
            logprobs, entropy = score(piece, weight, chunk, compiled=self.compiled, entropy_slopes=self._entropy_slopes)
            kept = piece.detach()[chunk.pair_rows][chunk.term_pairs] if self._states else None
            yield ScoredTerms(logprobs, entropy, chunk.behaviour, chunk.advantages, chunk.weights, kept)
            if piece.grad is not None:
                gradients.append(piece.grad)
        if gradients:
            states.backward(torch.cat(gradients))

    def _run(self, one: Pass, trunk: KeysValues, length: int, kept: KeysValues | None) -> Tensor:
        decoder, device = self.decoder, self.decoder.device
        time = -len(one.ids) % BLOCK + len(one.ids)
        mask = self.mask(one, length, padded=(trunk[0][0].shape[1] if trunk else 0, time))
        numbers = np.zeros((2, 1, time), np.int64)
        numbers[0, 0, : len(one.ids)] = one.ids
        numbers[1, 0, : len(one.ids)] = one.positions
        ids, positions = to_device(numbers, device)
        x = decoder.embed(ids)
        cos, sin = decoder.cos[positions].unsqueeze(2), decoder.sin[positions].unsqueeze(2)
        checkpointed = self._checkpointed(time) if torch.is_grad_enabled() else 0
        for at, layer in enumerate(decoder.layers):
            before = trunk[at] if trunk else None
            arguments = (cast(DecoderLayer, layer), x, cos, sin, mask, before, kept is not None, self.compiled)
            if at < checkpointed:
                result: Any = cast(Any, checkpoint(_layer, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                result = _layer(*arguments)
            if kept is None:
                x = cast(Tensor, result)
            else:
                x, k, v = cast(tuple[Tensor, Tensor, Tensor], result)
                kept.append((k, v))
        return decoder.norm(x)[0]

    def mask(self, one: Pass, trunk: int, *, padded: tuple[int, int]) -> Mask:
        """Chooses the cheapest form of the mask. `padded` are the lengths of trunk and pass with padding."""
        device, half = self.decoder.device, self.decoder.embed.weight.dtype != torch.float32
        if self.compiled and half and path_area(one, trunk) <= FASTER * tree_area(one):  # in float32 there is no fast one of paths
            return path_mask(one, trunk=trunk, padded=padded, device=device)
        tree = tree_mask(one, trunk=trunk, padded=padded, device=device)
        return tree.blocks() if self.compiled else tree.dense()


def _layer(
    layer: DecoderLayer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
    before: tuple[Tensor, Tensor] | None,
    keep: bool,
    fast: bool,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Returns the layer's output and, if `keep`, its keys and values. Compiled if `fast`."""
    heads, mix = (compile_once(_heads), compile_once(_mix)) if fast else (_heads, _mix)
    q, k, v = heads(layer, x, cos, sin)
    keys, values = (k, v) if before is None else (torch.cat((before[0], k), dim=1), torch.cat((before[1], v), dim=1))
    x = mix(layer, x, _attend(q, keys, values, mask))
    return (x, k, v) if keep else x


def _heads(layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `DecoderLayer.heads`, but each [1, time, heads, dim] and in separate memory: so their gradients need no copies."""
    shape = layer.shape
    heads = layer.qkv(layer.norm1(x)).unflatten(-1, (-1, shape.head_dim))
    q, k, v = heads.tensor_split([shape.heads, shape.heads + shape.kv_heads], dim=2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _mix(layer: DecoderLayer, x: Tensor, attended: Tensor) -> Tensor:
    return layer.mix(x, attended.transpose(1, 2))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """All are [1, time, heads, dim]."""
    if isinstance(mask, PathMask):
        return attend_paths(q, k, v, mask)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    if isinstance(mask, BlockMask):
        mixed = compile_once(flex_attention)(
            q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=WHOLE_BLOCKS
        )
    else:
        mixed = _dense_attention(q, k, v, mask)
    return mixed.transpose(1, 2)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Folds heads that share a kv head into the time axis, so that keys need no copy per head."""
    _, heads, time, dim = q.shape
    repeats = heads // k.shape[1]
    folded = q.reshape(1, k.shape[1], repeats * time, dim)
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask.repeat(repeats, 1)).reshape(q.shape)
