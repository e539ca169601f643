"""The forward pass of training on a GPU: one attention kernel for all rows of a pass, compiled layers, checkpoints where needed.

The eager path in `forward.py` computes the same and is the oracle for this one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from penstock.engines.embedded.decoder import Decoder, DecoderLayer, rotate
from penstock.train.batches import Pass, PassRow
from penstock.train.compiling import compiled
from penstock.train.forward import KeysValues, ScoredTerms
from penstock.train.path_attention import FASTER, PathMask, attend_paths, path_area, path_mask, tree_area
from penstock.train.token_scores import TermTable, score
from penstock.train.transfer import to_device
from penstock.train.tree_attention import BLOCK, tree_mask

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
    heads, mix = (compiled(_heads), compiled(_mix)) if fast else (_heads, _mix)
    q, k, v = heads(layer, x, cos, sin)
    keys, values = (k, v) if before is None else (torch.cat((before[0], k), dim=1), torch.cat((before[1], v), dim=1))
    x = mix(layer, x, _attend(q, keys, values, mask))
    return (x, k, v) if keep else x


def _heads(layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `DecoderLayer.heads`, but each [1, time, heads, dim] and in memory of its own: so their gradients need no copies."""
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
        mixed = compiled(flex_attention)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], kernel_options=WHOLE_BLOCKS)
    else:
        mixed = _dense_attention(q, k, v, mask)
    return mixed.transpose(1, 2)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Folds heads that share a kv head into the time axis, so that keys need no copy per head."""
    _, heads, time, dim = q.shape
    repeats = heads // k.shape[1]
    folded = q.reshape(1, k.shape[1], repeats * time, dim)
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask.repeat(repeats, 1)).reshape(q.shape)
