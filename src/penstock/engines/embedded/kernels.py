"""Triton kernels of the engine on a GPU: everything between two matrix products is one launch.

`fused.py` calls them, and has each of them in plain torch too. Keys and values are read through row numbers, so a row of the cache
may belong to any number of contexts. Sums are in float32, and results are rounded where the plain layers round them.
"""

# Triton has no types, and is installed with torch for a GPU only.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

AVAILABLE = find_spec("triton") is not None
if AVAILABLE:
    import triton.language as tl
    from triton import jit
else:

    def jit(fn: Any) -> Any:
        """The functions below exist all the same, and are not called."""
        return fn


# No argument of a kernel may be called `params`: Triton's code for a launch has a variable of that name.

MIN_DOT = 16
"""Fewest rows of a matrix product on tensor cores."""


@jit
def add_norm_kernel(x, y, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """x += y, out = norm(x) * weight; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < width
    value = tl.load(x + row * width + at, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + row * width + at, mask=keep, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row * width + at, rounded, mask=keep)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (value * scale * gain).to(out.dtype.element_ty), mask=keep)


@jit
def gate_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    """out = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=keep, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + at, (active * up).to(out.dtype.element_ty), mask=keep)


@jit
def add_into_kernel(total, part, count, BLOCK: tl.constexpr):
    """total += part, in the total's precision."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    added = tl.load(total + at, mask=keep) + tl.load(part + at, mask=keep).to(total.dtype.element_ty)
    tl.store(total + at, added, mask=keep)


@jit
def rotate_store_kernel(
    qkv, q_gain, k_gain, cos, sin, positions, rows, q, keys, values, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate queries and keys; write keys and values to their rows of the cache. One program per token and head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    keep = at < DIM
    rolled = (at + DIM // 2) % DIM
    source = qkv + (token * (HEADS + 2 * KV) + head) * DIM
    x = tl.load(source + at, mask=keep, other=0.0)
    row = tl.load(rows + token).to(tl.int64)
    if head >= HEADS + KV:
        tl.store(values + (row * KV + head - HEADS - KV) * DIM + at, x, mask=keep)
    else:
        other = tl.load(source + rolled, mask=keep, other=0.0)
        if NORM:
            if head < HEADS:
                gain = tl.load(q_gain + at, mask=keep, other=0.0).to(tl.float32)
                other_gain = tl.load(q_gain + rolled, mask=keep, other=0.0).to(tl.float32)
            else:
                gain = tl.load(k_gain + at, mask=keep, other=0.0).to(tl.float32)
                other_gain = tl.load(k_gain + rolled, mask=keep, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
            x = (wide * scale * gain).to(x.dtype)
            other = (other.to(tl.float32) * scale * other_gain).to(x.dtype)
        position = tl.load(positions + token).to(tl.int64)
        c = tl.load(cos + position * DIM + at, mask=keep, other=0.0).to(tl.float32)
        s = tl.load(sin + position * DIM + at, mask=keep, other=0.0).to(tl.float32)
        turned = (x.to(tl.float32) * c).to(x.dtype).to(tl.float32) + other.to(tl.float32) * s
        if head < HEADS:
            tl.store(q + (token * HEADS + head) * DIM + at, turned.to(x.dtype), mask=keep)
        else:
            tl.store(keys + (row * KV + head - HEADS) * DIM + at, turned.to(x.dtype), mask=keep)


@jit
def decode_attention_kernel(
    q, keys, values, table, lengths, out, parts, scale, table_width,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One new token per lane against `lengths[lane]` rows of the cache, in SPLITS parts. One program per lane, head and part.

    `parts` [lanes, heads, SPLITS, DIM + 2] takes unnormalized sums, then the greatest score and the sum of weights.
    """
    lane, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + lane)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    start = part * share
    end = tl.minimum(start + share, length)
    m, d, n = tl.arange(0, M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mine = (m[:, None] < GROUP) & (d[None, :] < DIM)
    first = (lane * KV + head) * GROUP
    query = tl.load(q + (first + m[:, None]) * DIM + d[None, :], mask=mine, other=0.0)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_N):
        seen = at + n < end
        row = tl.load(table + lane * table_width + at + n, mask=seen, other=0).to(tl.int64)
        place = (row * KV + head) * DIM
        key = tl.load(keys + place[None, :] + d[:, None], mask=seen[None, :] & (d[:, None] < DIM), other=0.0)
        score = tl.dot(query, key, input_precision="ieee" if EXACT else None) * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(best - higher)
        value = tl.load(values + place[:, None] + d[None, :], mask=seen[:, None] & (d[None, :] < DIM), other=0.0)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee" if EXACT else None)
        best = higher
    if SPLITS == 1:
        tl.store(out + (first + m[:, None]) * DIM + d[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=mine)
    else:
        place = parts + ((first + m) * SPLITS + part) * (DIM + 2)
        tl.store(place[:, None] + d[None, :], mixed, mask=mine)
        tl.store(place + DIM, best, mask=m < GROUP)
        tl.store(place + DIM + 1, total, mask=m < GROUP)


@jit
def join_parts_kernel(parts, out, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """Join the parts of `decode_attention_kernel`. One program per lane and head."""
    head = tl.program_id(0).to(tl.int64)
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    place = parts + (head * SPLITS + s) * (DIM + 2)
    best = tl.load(place + DIM)
    weight = tl.exp2(best - tl.max(best, 0))
    mixed = tl.load(place[:, None] + d[None, :], mask=d[None, :] < DIM, other=0.0)
    total = tl.sum(weight * tl.load(place + DIM + 1), 0)
    tl.store(out + head * DIM + d, (tl.sum(mixed * weight[:, None], 0) / total).to(out.dtype.element_ty), mask=d < DIM)


@jit
def prefill_attention_kernel(
    q, keys, values, context, blocks, out, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Up to M / PADDED consecutive tokens against the rows of their context. One program per block of tokens and head.

    `blocks` [blocks, 4]: first token, how many, position of the first, where the rows of its context begin in `context`.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(blocks + block * 4).to(tl.int64), tl.load(blocks + block * 4 + 1)
    position, begin = tl.load(blocks + block * 4 + 2), tl.load(blocks + block * 4 + 3).to(tl.int64)
    m, d, n = tl.arange(0, M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    token, member = m // PADDED, m % PADDED
    mine = ((token < count) & (member < GROUP))[:, None] & (d[None, :] < DIM)
    place = ((first + token) * KV * GROUP + head * GROUP + member) * DIM
    query = tl.load(q + place[:, None] + d[None, :], mask=mine, other=0.0)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, BLOCK_D], tl.float32)
    end = position + count
    for at in range(0, end, BLOCK_N):
        seen = at + n < end
        row = tl.load(context + begin + at + n, mask=seen, other=0).to(tl.int64)
        where = (row * KV + head) * DIM
        key = tl.load(keys + where[None, :] + d[:, None], mask=seen[None, :] & (d[:, None] < DIM), other=0.0)
        score = tl.dot(query, key, input_precision="ieee" if EXACT else None) * scale
        score = tl.where((at + n)[None, :] <= (position + token)[:, None], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(best - higher)
        value = tl.load(values + where[:, None] + d[None, :], mask=seen[:, None] & (d[None, :] < DIM), other=0.0)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee" if EXACT else None)
        best = higher
    tl.store(out + place[:, None] + d[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=mine)


@jit
def chunk_best_kernel(logits, best, best_at, vocab, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Greatest logit of each chunk of a row, and where it is."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.max((value != value).to(tl.int32), 0)
    top = tl.max(value, 0)
    tl.store(best + row * CHUNKS + chunk, tl.where(broken > 0, float("nan"), top))
    tl.store(best_at + row * CHUNKS + chunk, tl.min(tl.where(value == top, at, vocab), 0))


@jit
def chunk_sums_kernel(
    logits, best, settings, plain, tempered, vocab,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per chunk the sum of exp(logit - best), and per block the sum of exp((logit - best) / temperature)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, PADDED)
    tops = tl.load(best + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    broken = tl.max((tops != tops).to(tl.int32), 0)
    top = tl.where(broken > 0, float("nan"), tl.max(tops, 0))
    temperature = tl.load(settings + row * 4)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    keep = at < vocab
    shifted = tl.load(logits + row * vocab + at, mask=keep, other=float("-inf")).to(tl.float32) - top
    tl.store(plain + row * CHUNKS + chunk, tl.sum(tl.where(keep, tl.exp(shifted), 0.0), 0))
    weight = tl.where(keep, tl.exp(tl.div_rn(shifted, temperature)), 0.0)
    sums = tl.sum(tl.reshape(weight, [CHUNK // BLOCK, BLOCK]), 1)
    tl.store(tempered + (row * CHUNKS + chunk) * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK), sums)


@jit
def pick_kernel(
    logits, best, best_at, plain, tempered, settings, uniforms, ids, logprobs, full_logprobs, vocab,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at which the running sum passes its uniform number. One program per row; see `sampling.py`."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    tops = tl.load(best + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    broken = tl.max((tops != tops).to(tl.int32), 0)
    top = tl.where(broken > 0, float("nan"), tl.max(tops, 0))
    greatest = tl.load(best_at + row * CHUNKS + c, mask=c < CHUNKS, other=vocab)
    greedy = tl.min(tl.where(tops == top, greatest, vocab - 1), 0)
    full = tl.sum(tl.load(plain + row * CHUNKS + c, mask=c < CHUNKS, other=0.0).to(tl.float64), 0)
    temperature = tl.load(settings + row * 4)
    b = tl.arange(0, PADDED_BLOCKS)
    sums = tl.load(tempered + row * BLOCKS + b, mask=b < BLOCKS, other=0.0).to(tl.float64)
    reach = tl.cumsum(sums, 0)
    whole = tl.max(reach, 0)
    target = tl.load(uniforms + row) * whole
    last = tl.max(tl.where(sums > 0.0, b, 0), 0)
    block = tl.minimum(tl.sum((reach <= target).to(tl.int32), 0), last)
    rest = target - tl.sum(tl.where(b == block, reach - sums, 0.0), 0)
    i = tl.arange(0, BLOCK)
    at = block * BLOCK + i
    keep = at < vocab
    shifted = tl.load(logits + row * vocab + at, mask=keep, other=float("-inf")).to(tl.float32) - top
    weight = tl.where(keep, tl.exp(tl.div_rn(shifted, tl.where(temperature == 0.0, 1.0, temperature))), 0.0).to(tl.float64)
    last = tl.max(tl.where(weight > 0.0, i, 0), 0)
    drawn = block * BLOCK + tl.minimum(tl.sum((tl.cumsum(weight, 0) <= rest).to(tl.int32), 0), last)
    token = tl.minimum(tl.maximum(tl.where(temperature == 0.0, greedy, drawn), 0), vocab - 1)
    gap = tl.load(logits + row * vocab + token).to(tl.float32) - top
    full_logprob = gap.to(tl.float64) - tl.log(full)
    scaled = tl.div_rn(gap, tl.where(temperature == 0.0, 1.0, temperature)).to(tl.float64) - tl.log(whole)
    logprob = tl.where(temperature == 1.0, full_logprob, tl.where(temperature == 0.0, 0.0 * full_logprob, scaled))
    tl.store(ids + row, token.to(tl.int64))
    tl.store(logprobs + row, logprob)
    tl.store(full_logprobs + row, full_logprob)


@jit
def forbid_kernel(logits, allowed, vocab, words, BLOCK: tl.constexpr):
    """Set logits [rows, vocab] to -inf where the bit in `allowed` [rows, words] is 0."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(allowed + row * words + token // 32, mask=token < vocab, other=-1)
    forbidden = (bits >> (token % 32)) & 1 == 0
    tl.store(logits + row * vocab + token, float("-inf"), mask=forbidden & (token < vocab))


@jit
def locate_kernel(state, table, ring, rows, lengths, uniforms, lanes, table_width, ring_width):
    """Where each lane's token goes, how many rows it reads, and the uniform number of the token to draw.

    A lane that is not alive writes to row 0 and reads one row.
    """
    lane = tl.program_id(0).to(tl.int64)
    position, alive = tl.load(state + lanes + lane), tl.load(state + 3 * lanes + lane)
    tl.store(rows + lane, tl.load(table + lane * table_width + position, mask=alive > 0, other=0))
    tl.store(lengths + lane, tl.where(alive > 0, position + 1, 1).to(tl.int32))
    tl.store(uniforms + lane, tl.load(ring + lane * ring_width + (position + 1) % ring_width))


@jit
def advance_kernel(state, stops, ids, logprobs, full_logprobs, cursor, out, lanes, steps, STOPS: tl.constexpr):
    """Record each lane's token in `out` [lanes, steps, 3] and make it the next input, unless the reply ends with it."""
    lane = tl.program_id(0).to(tl.int64)
    step = tl.load(cursor)
    position, limit = tl.load(state + lanes + lane), tl.load(state + 2 * lanes + lane)
    alive = tl.load(state + 3 * lanes + lane)
    token, full = tl.load(ids + lane), tl.load(full_logprobs + lane)
    place = out + (lane * steps + step) * 3
    tl.store(place, tl.where(alive > 0, token.to(tl.float64), -1.0))
    tl.store(place + 1, tl.load(logprobs + lane))
    tl.store(place + 2, full)
    stopped = tl.sum((tl.load(stops + lane * STOPS + tl.arange(0, STOPS)) == token).to(tl.int32), 0) > 0
    broken = (full != full) | (full == float("-inf"))
    goes_on = (alive > 0) & (position + 2 < limit) & (stopped == 0) & (broken == 0)
    tl.store(state + lane, tl.where(alive > 0, token, 0))
    tl.store(state + lanes + lane, tl.where(goes_on, position + 1, position))
    tl.store(state + 3 * lanes + lane, goes_on.to(tl.int64))


LOG2E = 1.4426950408889634
CHUNK = 4096


def power_of_two(value: int, least: int = 1) -> int:
    return max(least, 1 << (value - 1).bit_length())


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = power_of_two(width)
    warps = 4 if block <= 2048 else 8
    add_norm_kernel[(x.shape[0],)](
        x, x if y is None else y, weight, out, width, eps, ADD=y is not None, BLOCK=block, num_warps=warps
    )
    return out


def gate(gate_up: Tensor) -> Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    gate_kernel[(rows, -(-inner // 1024))](gate_up, out, inner, BLOCK=1024)
    return out


def add_into(total: Tensor, part: Tensor) -> None:
    block = 4096
    add_into_kernel[(-(-total.numel() // block),)](total, part, total.numel(), BLOCK=block, num_warps=8)


def rotate_store(
    qkv: Tensor, gains: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, rows: Tensor,
    keys: Tensor, values: Tensor, heads: int,
) -> Tensor:  # fmt: skip
    tokens, (_, kv, dim) = qkv.shape[0], keys.shape
    q = qkv.new_empty(tokens, heads, dim)
    q_gain, k_gain = gains or (cos, cos)
    rotate_store_kernel[(tokens, heads + 2 * kv)](
        qkv, q_gain, k_gain, cos, sin, positions, rows, q, keys, values, eps,
        HEADS=heads, KV=kv, DIM=dim, BLOCK=power_of_two(dim), NORM=gains is not None, num_warps=1,
    )  # fmt: skip
    return q


def splits_for(lanes: int, kv: int) -> int:
    """Parts of a context that are read side by side: enough programs for the GPU, few enough to join."""
    return min(64, power_of_two(-(-768 // (lanes * kv))))


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *, splits: int = 0, block_n: int = 0, warps: int = 0,
    stages: int = 0,
) -> Tensor:  # fmt: skip
    lanes, heads, dim = q.shape
    kv = keys.shape[1]
    exact = q.dtype == torch.float32
    splits = splits or splits_for(lanes, kv)
    out = torch.empty_like(q)
    wide = exact or dim > 64
    parts = torch.empty(lanes, heads, splits, dim + 2, device=q.device) if splits > 1 else out
    block_d, group = power_of_two(dim, MIN_DOT), heads // kv
    decode_attention_kernel[(lanes, kv, splits)](
        q, keys, values, table, lengths, out, parts, dim**-0.5 * LOG2E, table.shape[1],
        KV=kv, GROUP=group, DIM=dim, M=power_of_two(group, MIN_DOT), BLOCK_D=block_d, BLOCK_N=block_n or (32 if wide else 64),
        SPLITS=splits, EXACT=exact, num_warps=warps or (4 if exact else 1 if wide else 2), num_stages=stages or 2,
    )  # fmt: skip
    if splits > 1:
        join_parts_kernel[(lanes * heads,)](parts, out, DIM=dim, BLOCK_D=block_d, SPLITS=splits, num_warps=2)
    return out


def block_tokens(heads: int, kv: int) -> int:
    """Tokens of one program of `prefill_attention`."""
    return max(1, 64 // power_of_two(heads // kv))


def prefill_attention(q: Tensor, keys: Tensor, values: Tensor, context: Tensor, blocks: Tensor) -> Tensor:
    _, heads, dim = q.shape
    kv = keys.shape[1]
    exact = q.dtype == torch.float32
    padded = power_of_two(heads // kv)
    out = torch.zeros_like(q)
    prefill_attention_kernel[(blocks.shape[0], kv)](
        q, keys, values, context, blocks, out, dim**-0.5 * LOG2E,
        KV=kv, GROUP=heads // kv, PADDED=padded, DIM=dim, M=max(MIN_DOT, padded * block_tokens(heads, kv)),
        # Exact products are written out as single operations: larger blocks take ten seconds and more to compile.
        BLOCK_D=power_of_two(dim, MIN_DOT), BLOCK_N=16 if exact else 64, EXACT=exact, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def draw(logits: Tensor, params: Tensor, uniforms: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """`logits` [rows, vocab] in their own precision; the temperatures are the first column of `params`."""
    rows, vocab = logits.shape
    device, chunks = logits.device, -(-vocab // CHUNK)
    best = torch.empty(rows, chunks, device=device)
    best_at = torch.empty(rows, chunks, device=device, dtype=torch.int32)
    plain = torch.empty(rows, chunks, device=device)
    blocks = chunks * (CHUNK // block)
    tempered = torch.empty(rows, blocks, device=device)
    ids = torch.empty(rows, dtype=torch.long, device=device)
    logprobs = torch.empty(rows, dtype=torch.float64, device=device)
    full = torch.empty_like(logprobs)
    padded = power_of_two(chunks)
    chunk_best_kernel[(rows, chunks)](logits, best, best_at, vocab, CHUNKS=chunks, CHUNK=CHUNK)
    chunk_sums_kernel[(rows, chunks)](
        logits, best, params, plain, tempered, vocab, CHUNKS=chunks, PADDED=padded, CHUNK=CHUNK, BLOCK=block
    )
    pick_kernel[(rows,)](
        logits, best, best_at, plain, tempered, params, uniforms, ids, logprobs, full, vocab,
        CHUNKS=chunks, PADDED=padded, BLOCKS=blocks, PADDED_BLOCKS=power_of_two(blocks), BLOCK=block,
    )  # fmt: skip
    return ids, logprobs, full


def forbid(logits: Tensor, allowed: Tensor) -> None:
    rows, vocab = logits.shape
    forbid_kernel[(rows, -(-vocab // CHUNK))](logits, allowed, vocab, allowed.shape[1], BLOCK=CHUNK, num_warps=8)


def locate(state: Tensor, table: Tensor, ring: Tensor, rows: Tensor, lengths: Tensor, uniforms: Tensor) -> None:
    sizes = state.shape[1], table.shape[1], ring.shape[1]
    locate_kernel[(rows.shape[0],)](state, table, ring, rows, lengths, uniforms, *sizes, num_warps=1)


def advance(state: Tensor, stops: Tensor, drawn: tuple[Tensor, Tensor, Tensor], cursor: Tensor, out: Tensor) -> None:
    grid = (drawn[0].shape[0],)
    advance_kernel[grid](state, stops, *drawn, cursor, out, state.shape[1], out.shape[1], STOPS=stops.shape[1], num_warps=1)
