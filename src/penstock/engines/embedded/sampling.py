"""Sampling: draws the next token of every running request from its logits, with its log-probability.

Two log-probabilities come with each token. `logprobs` is under the distribution that the token was really drawn from, after
temperature, top-k, top-p and min-p; `full_logprobs` is under the plain softmax. The trainer takes the first as the behaviour
probability and computes its own at the same temperature: an importance ratio is only correct against the distribution that
sampled, and a ratio of two tempered probabilities starts at 1 for fresh tokens. The second is for audits, which need not
know how a request was sampled, and for the KL to a reference policy. A greedy token had no alternative: its log-probability is 0.

Randomness is one uniform number per token, from the request's own generator, pushed through the inverse of the cumulative
distribution: what a request draws does not depend on who shares its batch.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.records import Sampling

BLOCK = 128
"""Weights are summed in blocks of this many; only the block of the drawn token is searched token by token."""

SamplingKind = Literal["greedy", "plain", "tempered", "truncated"]


class DrawnTokens(NamedTuple):
    """One token per row, each [rows]; log-probabilities are float64, NaN if the row's logits had NaN."""

    ids: Tensor
    logprobs: Tensor
    full_logprobs: Tensor
    kept: Tensor | None = None
    """[rows, vocab]: whether top-k, top-p and min-p leave a token; None if no row has any of them. Other rows mean nothing."""


def sample(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> DrawnTokens:
    """Draw one token per row of float32 `logits` [rows, vocab]; `uniforms` are in [0, 1)."""
    shifted = logits - logits.amax(-1, keepdim=True)  # the best token at 0, so that no exponential overflows
    weights = shifted.exp()
    sums = _block_sums(weights)
    ids = torch.empty(len(samplings), dtype=torch.long, device=logits.device)
    relative = torch.zeros(len(samplings), dtype=torch.float64, device=logits.device)
    uniform = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    kinds = [_kind(sampling) for sampling in samplings]
    kept = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device) if "truncated" in kinds else None
    for kind in dict.fromkeys(kinds):
        rows = [row for row, other in enumerate(kinds) if other == kind]
        index = torch.tensor(rows, device=logits.device)
        chosen = [samplings[row] for row in rows]
        whole = len(rows) == len(kinds)
        part = shifted if whole else shifted[index]
        if kind == "greedy":
            ids[index] = part.argmax(-1)
        elif kind == "plain":
            ids[index] = _invert(weights if whole else weights[index], sums[index], uniform[index])
        elif kind == "tempered":
            ids[index], relative[index] = _tempered(part, chosen, uniform[index])
        elif kept is not None:
            ids[index], relative[index], kept[index] = _truncated(part, chosen, uniform[index])
    full = shifted.gather(-1, ids[:, None])[:, 0].double() - sums.sum(-1).log()
    plain = torch.tensor([kind == "plain" for kind in kinds], device=logits.device)
    return DrawnTokens(ids, torch.where(plain, full, relative + 0.0 * full), full, kept)


class MostLikely(NamedTuple):
    """Each [rows, count], best first; log-probabilities are float64, -inf for tokens that are not allowed."""

    ids: Tensor
    logprobs: Tensor


def most_likely(logits: Tensor, count: int) -> MostLikely:
    """The likeliest tokens of each row of float32 `logits` [rows, vocab], as the full log-probabilities of `sample` have them."""
    shifted = logits - logits.amax(-1, keepdim=True)
    best, ids = shifted.topk(min(count, logits.shape[-1]))
    return MostLikely(ids, best.double() - _block_sums(shifted.exp()).sum(-1, keepdim=True).log())


def draw_rows(logits: Tensor, params: Tensor, uniform: Tensor, *, truncated: bool) -> DrawnTokens:
    """As `sample`, without a look at any value: the settings are a tensor, and shapes depend on nothing else.

    `params` [rows, 4] are temperature, top-k, top-p and min-p of each row; `truncated` says whether some row uses the last three.
    """
    temperature = params[:, :1]
    greedy = temperature == 0.0
    shifted = logits - logits.amax(-1, keepdim=True)
    plain = _block_sums(shifted.exp()).sum(-1).log()
    scaled = shifted / torch.where(greedy, 1.0, temperature)
    weights = scaled.exp()
    sums = _block_sums(weights)
    ids = _invert(weights, sums, uniform)
    relative = scaled.gather(-1, ids[:, None])[:, 0].double() - sums.sum(-1).log()
    kept: Tensor | None = None
    if truncated:
        cut_ids, cut_relative, kept = _truncated_rows(scaled, params, uniform)
        cut = (params[:, 1] > 0) | (params[:, 2] < 1.0) | (params[:, 3] > 0.0)
        ids, relative = torch.where(cut, cut_ids, ids), torch.where(cut, cut_relative, relative)
    else:
        cut = torch.zeros_like(greedy[:, 0])
    ids = torch.where(greedy[:, 0], shifted.argmax(-1), ids)
    full = shifted.gather(-1, ids[:, None])[:, 0].double() - plain
    relative = torch.where(greedy[:, 0], 0.0 * full, relative + 0.0 * full)
    return DrawnTokens(ids, torch.where((temperature[:, 0] == 1.0) & ~cut, full, relative), full, kept)


class TruncatedDraw(NamedTuple):
    ids: Tensor
    logprobs: Tensor
    kept: Tensor
    """[rows, vocab]"""


def _truncated_rows(scaled: Tensor, params: Tensor, uniform: Tensor) -> TruncatedDraw:
    """As `_truncated`, over the whole vocabulary sorted."""
    vocab = scaled.shape[-1]
    top_k, top_p, min_p = params[:, 1:2], params[:, 2:3].double(), params[:, 3:4].double()
    ranks = torch.where(top_k > 0, top_k, vocab)
    mass = scaled.exp().sum(-1, keepdim=True).double()
    scaled, order = scaled.sort(-1, descending=True)
    rank = torch.arange(vocab, device=scaled.device)
    weights = scaled.double().exp().masked_fill(rank >= ranks, 0.0)
    mass = torch.where(ranks < vocab, weights.sum(-1, keepdim=True), mass)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill((rank > 0) & ((before >= top_p * mass) | (weights < min_p)), 0.0)
    return _draw_kept(scaled, order, weights, uniform, vocab)


def _kind(sampling: Sampling) -> SamplingKind:
    if sampling.temperature == 0.0:
        return "greedy"
    if sampling.truncated:
        return "truncated"
    return "plain" if sampling.temperature == 1.0 else "tempered"


def _tempered(shifted: Tensor, samplings: Sequence[Sampling], uniform: Tensor) -> tuple[Tensor, Tensor]:
    scaled = shifted / _column([s.temperature for s in samplings], shifted)
    weights = scaled.exp()
    sums = _block_sums(weights)
    ids = _invert(weights, sums, uniform)
    return ids, scaled.gather(-1, ids[:, None])[:, 0].double() - sums.sum(-1).log()


def _truncated(shifted: Tensor, samplings: Sequence[Sampling], uniform: Tensor) -> TruncatedDraw:
    """Top-k, then top-p of what is left, then min-p; the most likely token always stays."""
    vocab = shifted.shape[-1]
    ranks = _column([s.top_k or vocab for s in samplings], shifted).long()
    top_p, min_p = (_column([getattr(s, name) for s in samplings], shifted).double() for name in ("top_p", "min_p"))
    scaled = shifted / _column([s.temperature for s in samplings], shifted)
    mass = scaled.exp().sum(-1, keepdim=True).double()
    # Without top-k, tokens below an even share of the mass that top-p drops are always dropped: only the others are sorted.
    floor = torch.where(ranks < vocab, 0.0, torch.maximum(min_p, 0.999 * (1.0 - top_p) * mass / vocab))
    likely = (scaled >= floor.log()).sum(-1, keepdim=True)
    scaled, order = scaled.topk(max(1, int(torch.minimum(likely, ranks).max())))  # [rows, kept], best first
    rank = torch.arange(scaled.shape[-1], device=shifted.device)
    weights = scaled.double().exp().masked_fill(rank >= ranks, 0.0)
    mass = torch.where(ranks < vocab, weights.sum(-1, keepdim=True), mass)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill((rank > 0) & ((before >= top_p * mass) | (weights < min_p)), 0.0)  # the best one weighs 1
    return _draw_kept(scaled, order, weights, uniform, vocab)


def _draw_kept(scaled: Tensor, order: Tensor, weights: Tensor, uniform: Tensor, vocab: int) -> TruncatedDraw:
    """Draw from tokens sorted by `order` [rows, places], those with `weights` alone; `scaled` are their logits."""
    total = weights.sum(-1)
    place = _first_above(weights, uniform * total)
    kept = torch.zeros(len(order), vocab, dtype=torch.bool, device=order.device).scatter_(-1, order, weights > 0.0)
    return TruncatedDraw(order.gather(-1, place)[:, 0], scaled.gather(-1, place)[:, 0].double() - total.log(), kept)


def _invert(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: the id at which the sum of `weights` [rows, vocab] passes `uniform` of the total."""
    reach = sums.cumsum(-1)
    target = uniform * reach[:, -1]
    block = _first_above(sums, target)  # [rows, 1]
    rest = target - (reach.gather(-1, block) - sums.gather(-1, block))[:, 0]
    at = block * BLOCK + torch.arange(BLOCK, device=weights.device)  # [rows, BLOCK]
    inside = weights.gather(-1, at.clamp(max=weights.shape[-1] - 1)).double()
    inside = inside.masked_fill(at >= weights.shape[-1], 0.0)
    return (block * BLOCK + _first_above(inside, rest))[:, 0]


def _first_above(weights: Tensor, target: Tensor) -> Tensor:
    """Index [rows, 1] where the running sum first exceeds `target` [rows]; the last with weight, if rounding prevents that."""
    place = (weights.cumsum(-1) <= target[:, None]).sum(-1, keepdim=True)
    index = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0.0, index, 0).amax(-1, keepdim=True)
    return torch.minimum(place, last)


def _block_sums(weights: Tensor) -> Tensor:
    """Float64 sums [rows, blocks] of `weights` [rows, vocab] over blocks of BLOCK, the last one perhaps shorter."""
    short = -weights.shape[-1] % BLOCK
    padded = F.pad(weights, (0, short)) if short else weights
    return padded.view(weights.shape[0], -1, BLOCK).sum(-1).double()


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
