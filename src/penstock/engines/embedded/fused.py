"""The operations of a pass over the paged cache: Triton kernels on a GPU, the same in plain torch elsewhere.

The plain ones are the reference that the kernels are tested against, and let every test of the paged engine run on a CPU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.embedded import kernels as triton_kernels
from penstock.engines.embedded.decoder import Decoder, DecoderLayer, rotate
from penstock.engines.embedded.sampling import BLOCK, DrawnTokens, draw_rows

kernels = triton_kernels if triton_kernels.AVAILABLE else None


class PrefillBlocks(NamedTuple):
    """Which tokens of a packed pass attend to which rows."""

    context: Tensor
    """Rows of all contexts, one after the other."""
    blocks: Tensor
    """[blocks, 4]: first token, how many, position of the first, where its context begins in `context`."""


class KeyValueRows(NamedTuple):
    """Keys and values of all layers, a row per token; row 0 takes what nobody reads."""

    keys: Tensor
    """[layers, rows, kv_heads, dim]"""
    values: Tensor


def block_tokens(heads: int, kv_heads: int) -> int:
    return 16 if kernels is None else kernels.block_tokens(heads, kv_heads)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x += y in place; returns the norm of x."""
    if kernels is not None and x.is_cuda:
        return kernels.add_norm(x, y, weight, eps)
    if y is not None:
        x += y
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def gate(gate_up: Tensor) -> Tensor:
    if kernels is not None and gate_up.is_cuda:
        return kernels.gate(gate_up)
    left, right = gate_up.chunk(2, dim=-1)
    return F.silu(left) * right


def add_into(total: Tensor, part: Tensor) -> Tensor:
    """total += part in place. torch itself adds bfloat16 to float32 at a third of the speed of a GPU's memory."""
    if kernels is None or not total.is_cuda or not (total.is_contiguous() and part.is_contiguous()):
        return total.add_(part)
    kernels.add_into(total, part)
    return total


def rotate_store(
    decoder: Decoder, layer: DecoderLayer, qkv: Tensor, positions: Tensor, rows: Tensor, cache: KeyValueRows
) -> Tensor:
    """Rotate queries and keys, write keys and values to `rows` of the layer's cache; returns queries [tokens, heads, dim]."""
    shape, keys, values = decoder.shape, cache.keys[layer.index], cache.values[layer.index]
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
    if kernels is not None and qkv.is_cuda:
        gains = None if norms is None else (norms[0].weight, norms[1].weight)
        return kernels.rotate_store(
            qkv, gains, shape.norm_eps, decoder.cos, decoder.sin, positions, rows, keys, values, shape.heads
        )  # fmt: skip
    q, k, v = qkv.view(qkv.shape[0], -1, shape.head_dim).tensor_split([shape.heads, shape.heads + shape.kv_heads], 1)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    cos, sin = decoder.cos[positions][:, None], decoder.sin[positions][:, None]
    keys[rows], values[rows] = rotate(k, cos, sin), v
    return rotate(q, cos, sin)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Lane i's query attends to the rows `table[i, :lengths[i]]` of one layer's cache."""
    if kernels is not None and q.is_cuda:
        return kernels.decode_attention(q, keys, values, table, lengths)
    mixed = [_attend(q[i : i + 1], keys, values, table[i, : int(lengths[i])]) for i in range(q.shape[0])]
    return torch.cat(mixed)


def prefill_attention(q: Tensor, keys: Tensor, values: Tensor, packed: PrefillBlocks) -> Tensor:
    if kernels is not None and q.is_cuda:
        return kernels.prefill_attention(q, keys, values, *packed)
    out = torch.zeros_like(q)
    blocks: list[list[int]] = packed.blocks.tolist()  # pyright: ignore[reportUnknownVariableType]
    for first, count, position, begin in blocks:
        if not count:  # padding
            continue
        context = packed.context[begin : begin + position + count]
        out[first : first + count] = _attend(q[first : first + count], keys, values, context)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """The last tokens of a context attend to its rows, causally. q [tokens, heads, dim]."""
    later = torch.ones(q.shape[0], len(rows), dtype=torch.bool, device=q.device).triu(len(rows) - q.shape[0] + 1)
    k, v = keys[rows.long()].transpose(0, 1), values[rows.long()].transpose(0, 1)
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], ~later, enable_gqa=True)[0].transpose(0, 1)


def draw(logits: Tensor, params: Tensor, uniforms: Tensor, *, truncated: bool) -> DrawnTokens:
    """Draw a token per row; `params` [rows, 4] are temperature, top-k, top-p, min-p. `truncated`: some row uses the last three."""
    if kernels is not None and logits.is_cuda and not truncated:
        return DrawnTokens(*kernels.draw(logits, params, uniforms, BLOCK))
    return draw_rows(logits.float(), params, uniforms, truncated=truncated)


def forbid(logits: Tensor, allowed: Tensor) -> None:
    """Set logits [rows, vocab] to -inf where a token's bit in `allowed` [rows, words] is 0, the lowest bit of a word first."""
    if kernels is not None and logits.is_cuda:
        kernels.forbid(logits, allowed)
        return
    bits = (allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=allowed.device)) & 1
    logits.masked_fill_(bits.view(len(logits), -1)[:, : logits.shape[1]] == 0, float("-inf"))


def locate(state: Tensor, table: Tensor, ring: Tensor, rows: Tensor, lengths: Tensor, uniforms: Tensor) -> None:
    """Per lane: the row of its next token, the rows that it reads, and the uniform number of the token to draw."""
    if kernels is not None and state.is_cuda:
        kernels.locate(state, table, ring, rows, lengths, uniforms)
        return
    lanes = rows.shape[0]
    position, alive = state[1, :lanes], state[3, :lanes] > 0
    rows.copy_(torch.where(alive, table[:lanes].gather(1, position[:, None])[:, 0], 0))
    lengths.copy_(torch.where(alive, position + 1, 1))
    uniforms.copy_(ring[:lanes].gather(1, (position[:, None] + 1) % ring.shape[1])[:, 0])


def advance(state: Tensor, stops: Tensor, drawn: DrawnTokens, cursor: Tensor, out: Tensor) -> None:
    """Record each lane's token at `out[lane, cursor]` and make it the next input, unless the reply ends with it."""
    if kernels is not None and state.is_cuda:
        kernels.advance(state, stops, drawn[:3], cursor, out)
        return
    lanes = drawn.ids.shape[0]
    live = state[:, :lanes]
    _, position, limit, alive = live
    alive = alive > 0
    kept = torch.where(alive, drawn.ids, -1).double()
    out[:lanes].index_copy_(1, cursor, torch.stack((kept, drawn.logprobs, drawn.full_logprobs), -1)[:, None])
    stopped = (stops[:lanes] == drawn.ids[:, None]).any(1)
    goes_on = alive & (position + 2 < limit) & ~stopped & torch.isfinite(drawn.full_logprobs)
    live.copy_(torch.stack((torch.where(alive, drawn.ids, 0), position + goes_on, limit, goes_on.long())))
