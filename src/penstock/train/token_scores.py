"""Log-probabilities and entropy of trained tokens on a GPU, a chunk of hidden states at a time.

Logits exist for one chunk, in the decoder's precision; sums over the vocabulary are in float32. A chunk has *rows* (a hidden state
at a temperature), *pairs* (a row and a token it predicts) and *terms* (see `LossTerm`): several terms may share a pair.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from penstock.engines.token_sets import unpack_sets
from penstock.train import compiling
from penstock.train.batches import LossTerms
from penstock.train.forward import FORBIDDEN
from penstock.train.transfer import to_device


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
        statistics = compiling.compiled(_statistics) if compiled else _statistics
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
            slope = compiling.compiled(_slope_with_entropy) if ctx.compiled else _slope_with_entropy
            slopes = slope(logits, inverse, total, per_row, entropy, spread)
            own -= spread[rows] * logprobs.exp() * (logprobs + entropy[rows])
        else:
            slope = compiling.compiled(_slope) if ctx.compiled else _slope
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
