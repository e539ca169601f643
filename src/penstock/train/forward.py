"""Passes through the decoder: trunk, hidden states, and the log-probabilities of a pass's terms."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.engines.embedded.decoder import Decoder, causal
from penstock.train.attention import PrefixAttention
from penstock.train.batches import Pass, Term

LOGITS_AT_ONCE = 2**25
"""Bound on the elements of one stretch of logits (128 MB in float32)."""

KeysValues = list[tuple[Tensor, Tensor]]
"""Of each layer, [1, kv_heads, length, dim]."""


class Stretch(NamedTuple):
    """Consecutive terms of a pass whose logits are made together: one row of logits per place and temperature."""

    terms: tuple[Term, ...]
    places: tuple[int, ...]
    """Per row."""
    temperatures: tuple[float, ...]
    """Per row."""
    rows: tuple[int, ...]
    """Per term: its row."""


class Scores(NamedTuple):
    """Of the terms of a stretch, each [terms]."""

    logprobs: Tensor
    entropy: Tensor
    """Of the distribution that a term's token was drawn from; without a gradient."""


def trunk_states(decoder: Decoder, ids: Sequence[int]) -> KeysValues:
    """Keys and values of a trunk, with their graph; nothing for an empty one."""
    kept: KeysValues = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k, v))
        return causal(layer, q, k, v)

    if ids:
        row = torch.tensor([ids], device=decoder.device)
        decoder(row, torch.arange(len(ids), device=decoder.device).unsqueeze(0), attend)
    return kept


def hidden_states(decoder: Decoder, one: Pass, trunk: KeysValues, *, flat: bool) -> Tensor:
    """Last hidden states of a pass, [time, hidden]. The flat way, whole sequences and plain attention, is the other's oracle."""
    device, shape = decoder.device, decoder.shape
    ids, positions = torch.tensor(one.ids, device=device), torch.tensor(one.positions, device=device)
    if not flat:
        attend = PrefixAttention(one, trunk, repeats=shape.heads // shape.kv_heads, like=decoder.embed.weight)
        return decoder(ids.unsqueeze(0), positions.unsqueeze(0), attend)[0]
    rows = pad_sequence([ids[row.start : row.stop] for row in one.rows], batch_first=True)  # [rows, time], padded on the right,
    places = pad_sequence([positions[row.start : row.stop] for row in one.rows], batch_first=True)  # where nothing is read from
    hidden = decoder(rows, places, causal)
    return torch.cat([state[: row.stop - row.start] for state, row in zip(hidden, one.rows, strict=True)])


def stretches(one: Pass, vocab_size: int) -> Iterator[Stretch]:
    """The terms of a pass in order, so many at a time that their logits stay within bounds."""
    limit = max(1, LOGITS_AT_ONCE // vocab_size)
    rows: dict[tuple[int, float], int] = {}
    start = 0
    for end, term in enumerate(one.terms):
        if (term.at, term.temperature) not in rows and len(rows) == limit:
            yield _stretch(one.terms[start:end], rows)
            rows, start = {}, end
        rows.setdefault((term.at, term.temperature), len(rows))
    if rows:
        yield _stretch(one.terms[start:], rows)


def score(decoder: Decoder, hidden: Tensor, stretch: Stretch) -> Scores:
    """Log-probabilities of a stretch's terms at their temperatures; hidden [time, hidden] are the states of the whole pass."""
    device = hidden.device
    heat = torch.tensor(stretch.temperatures, device=device, dtype=hidden.dtype).unsqueeze(1)
    states = hidden[torch.tensor(stretch.places, device=device)] / heat  # dividing these divides the logits, for less
    logprobs = decoder.logits(states).log_softmax(dim=-1)  # [rows, vocab]
    with torch.no_grad():
        entropy = -logprobs.exp().mul_(logprobs).sum(dim=-1)  # [rows]
    rows = torch.tensor(stretch.rows, device=device)
    targets = torch.tensor([term.target for term in stretch.terms], device=device)
    return Scores(logprobs[rows, targets], entropy[rows])


@torch.no_grad()
def pass_logprobs(decoder: Decoder, one: Pass, trunk: KeysValues, *, flat: bool) -> Tensor:
    """Log-probabilities of all terms of a pass, [terms], for reading only."""
    hidden = hidden_states(decoder, one, trunk, flat=flat)
    return torch.cat([score(decoder, hidden, stretch).logprobs for stretch in stretches(one, decoder.shape.vocab_size)])


def _stretch(terms: tuple[Term, ...], rows: dict[tuple[int, float], int]) -> Stretch:
    places, temperatures = zip(*rows, strict=True)
    return Stretch(terms, places, temperatures, tuple(rows[term.at, term.temperature] for term in terms))
