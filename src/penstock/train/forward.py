"""The forward pass of training: hidden states of a pass whose rows share prefixes, and log-probabilities of its terms."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.engines.embedded.decoder import Decoder, causal
from penstock.engines.token_sets import unpack_sets
from penstock.train.batches import LossTerm, Pass, PassRow
from penstock.train.device import to_device

MAX_PADDING = 1.25
"""Largest ratio of padded to real work in a block. Higher means fewer calls but more work on padding."""


class RowBlock(NamedTuple):
    """Rows of similar size, padded so that one call computes their attention."""

    queries: Tensor
    """[rows, time]: indices into the pass."""
    keys: Tensor
    """[rows, context]: indices into the trunk followed by the pass."""
    mask: Tensor | None
    """[rows, 1, repeats * time, context]: 0 where a query reads a key, else -inf. None for one row that reads only itself."""


class PrefixAttention:
    """An `attend` for the decoder: each row of a pass reads the trunk, its spans and itself.

    Shared keys are copied for each row, which is cheap: sharing saves the work of projections and MLPs.
    """

    def __init__(self, one: Pass, trunk: Sequence[tuple[Tensor, Tensor]], *, repeats: int, like: Tensor) -> None:
        """`trunk` has keys and values per layer, [1, kv_heads, length, dim], or is empty. `repeats` is heads per kv head.

        `like` is any tensor with the decoder's device and dtype.
        """
        self.trunk, self.repeats = trunk, repeats
        length = trunk[0][0].shape[2] if trunk else 0
        alike = _blocks(one.rows, length)
        self.blocks = [_block(rows, length, repeats, like) for rows in alike]
        order = torch.cat([_query_places(rows) for rows in alike])
        self.order = torch.argsort(order)[-len(one.ids) :].to(like.device)
        """[time]: the index of each token of the pass among the padded queries of all blocks."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, time, dim]; k, v [1, kv_heads, time, dim] → [1, heads, time, dim]."""
        if self.trunk:
            before_k, before_v = self.trunk[layer]
            k, v = torch.cat((before_k, k), dim=2), torch.cat((before_v, v), dim=2)
        mixed = [self._attend(block, q, k, v) for block in self.blocks]  # each [rows * time, heads, dim]
        return torch.cat(mixed).index_select(0, self.order).transpose(0, 1).unsqueeze(0)

    def _attend(self, block: RowBlock, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _gather(q, block.queries), _gather(k, block.keys), _gather(v, block.keys)
        rows, heads, time, dim = q.shape
        if block.mask is None:
            mixed = causal(0, q, k, v)
        else:  # fold heads that share a kv head into the time axis, so that keys need no copy per head
            folded = q.reshape(rows, heads // self.repeats, self.repeats * time, dim)
            mixed = F.scaled_dot_product_attention(folded, k, v, attn_mask=block.mask).reshape(rows, heads, time, dim)
        return mixed.transpose(1, 2).reshape(rows * time, heads, dim)


def _gather(x: Tensor, places: Tensor) -> Tensor:
    """x [1, heads, time, dim], places [rows, n] → [rows, heads, n, dim]."""
    picked = x[0].transpose(0, 1).index_select(0, places.flatten())
    return picked.view(*places.shape, x.shape[1], x.shape[3]).transpose(1, 2)


def _size(row: PassRow) -> int:
    return row.stop - row.start


def _context(row: PassRow, trunk: int) -> int:
    return trunk + sum(stop - start for start, stop in row.spans) + _size(row)


def _blocks(rows: Sequence[PassRow], trunk: int) -> list[list[PassRow]]:
    """Groups rows into blocks, longest first. A row that would exceed `MAX_PADDING` starts a new block."""
    blocks: list[list[PassRow]] = []
    work, width, height = 0, 0, 0
    for row in sorted(rows, key=lambda row: (-_size(row), row.start)):
        area = _size(row) * _context(row, trunk)
        height = max(height, _context(row, trunk))
        if not blocks or width * height * (len(blocks[-1]) + 1) > MAX_PADDING * (work + area):
            blocks.append([])
            work, width, height = 0, _size(row), _context(row, trunk)
        blocks[-1].append(row)
        work += area
    return blocks


def _query_places(rows: list[PassRow]) -> Tensor:
    """Returns [rows * time]: the index in the pass of each query, -1 for padding."""
    time = _size(rows[0])
    return torch.cat([F.pad(torch.arange(row.start, row.stop), (0, time - _size(row)), value=-1) for row in rows])


def _block(rows: list[PassRow], trunk: int, repeats: int, like: Tensor) -> RowBlock:
    time, context = _size(rows[0]), max(_context(row, trunk) for row in rows)
    queries = _query_places(rows).clamp(min=0).view(len(rows), time).to(like.device)
    keys = torch.zeros(len(rows), context, dtype=torch.long)
    for at, row in enumerate(rows):
        spans = [torch.arange(trunk)] + [torch.arange(start, stop) + trunk for start, stop in (*row.spans, (row.start, row.stop))]
        keys[at, : _context(row, trunk)] = torch.cat(spans)
    if len(rows) == 1 and context == time:
        return RowBlock(queries, keys.to(like.device), None)
    # A query reads all keys up to its own. Padding reads key 0, since softmax over no keys is NaN; its output is never used.
    first = torch.tensor([[_context(row, trunk) - _size(row)] for row in rows])  # [rows, 1]
    last = torch.where(torch.arange(time) < torch.tensor([[_size(row)] for row in rows]), first + torch.arange(time), 0)
    unread = torch.arange(context) > last.unsqueeze(-1)  # [rows, time, context]
    mask = torch.zeros(unread.shape).masked_fill(unread, float("-inf"))
    return RowBlock(queries, keys.to(like.device), mask.repeat(1, repeats, 1).unsqueeze(1).to(like))


MAX_LOGITS = 2**24
"""Bound on the elements of one chunk of logits (64 MB in float32, and as much again for each of three steps of the loss)."""

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values per layer; each `PassForward` has its own layout of them."""


FORBIDDEN = -1e30
"""The logit of a token that could not be chosen. Finite, so that its probability of 0 times its logarithm is 0."""


class LogitsChunk(NamedTuple):
    """Consecutive terms of a pass whose logits are computed together, one row per distinct place, temperature and set of tokens."""

    terms: tuple[LossTerm, ...]
    places: tuple[int, ...]
    """Per row: the index of its hidden state in the pass."""
    temperatures: tuple[float, ...]
    """Per row."""
    rows: tuple[int, ...]
    """The row of each term."""
    allowed: tuple[bytes, ...]
    """Per row: the tokens that may be chosen; empty as a whole if no row has a limit."""


class TermScores(NamedTuple):
    """Scores of a chunk's terms, each [terms]."""

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution at the term's place and temperature, without a gradient unless asked for."""


class ScoredTerms(NamedTuple):
    """Consecutive terms of a pass with their scores, each [terms]. The last three are those of `LossTerm`, weights in float64."""

    logprobs: Tensor
    entropy: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    states: Tensor | None = None
    """[terms, hidden]: the hidden states that predict them, where asked for; without a gradient."""


class PassForward(Protocol):
    """A way to compute the passes of a set."""

    def trunk_states(self, ids: Sequence[int]) -> KeysValues:
        """Returns the keys and values of a trunk with their autograd graph, or [] for an empty trunk."""
        ...

    def scored(self, one: Pass, trunk: KeysValues, length: int) -> Iterator[ScoredTerms]:
        """Yields the terms of a pass in order. `length` is the number of tokens in the trunk, which may be padded.

        With gradients, call `backward` on each chunk before taking the next one. Logits thus exist for one chunk at a time, and
        one backward pass through the model follows the last chunk.
        """
        ...


class EagerForward:
    """A `PassForward` of plain operations: the only one on a CPU, and the oracle for others."""

    def __init__(self, decoder: Decoder, *, flat: bool, entropy_slopes: bool = False, states: bool = False) -> None:
        """`entropy_slopes`: entropies have a gradient. `states`: hidden states are given with the terms."""
        self._decoder, self._flat, self._entropy_slopes, self._states = decoder, flat, entropy_slopes, states

    def trunk_states(self, ids: Sequence[int]) -> KeysValues:
        return trunk_states(self._decoder, ids)

    def scored(self, one: Pass, trunk: KeysValues, length: int) -> Iterator[ScoredTerms]:
        hidden = hidden_states(self._decoder, one, trunk, flat=self._flat)
        leaf = hidden.detach().requires_grad_()  # sums the gradients of all chunks
        for chunk in logits_chunks(one, self._decoder.shape.vocab_size):
            scores = score_chunk(self._decoder, leaf, chunk, entropy_slopes=self._entropy_slopes)
            columns = torch.tensor(
                [(t.logprob, t.advantage, t.weight) for t in chunk.terms], dtype=torch.float64, device=leaf.device
            )
            states = leaf.detach()[[term.at for term in chunk.terms]] if self._states else None
            yield ScoredTerms(*scores, columns[:, 0].float(), columns[:, 1].float(), columns[:, 2], states)
        if leaf.grad is not None:
            hidden.backward(leaf.grad)


def trunk_states(decoder: Decoder, ids: Sequence[int]) -> KeysValues:
    """Returns the keys and values of a trunk with their autograd graph, or [] for an empty trunk."""
    kept: KeysValues = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k, v))
        return causal(layer, q, k, v)

    if ids:
        row = torch.tensor([ids], device=decoder.device)
        decoder(row, torch.arange(len(ids), device=decoder.device).unsqueeze(0), attend)
    return kept


def hidden_states(decoder: Decoder, one: Pass, trunk: KeysValues, *, flat: bool) -> Tensor:
    """Returns the last hidden states of a pass, [time, hidden]. `flat`: rows are whole sequences, under plain attention."""
    device, shape = decoder.device, decoder.shape
    ids, positions = torch.tensor(one.ids, device=device), torch.tensor(one.positions, device=device)
    if not flat:
        attend = PrefixAttention(one, trunk, repeats=shape.heads // shape.kv_heads, like=decoder.embed.weight)
        return decoder(ids.unsqueeze(0), positions.unsqueeze(0), attend)[0]
    rows = pad_sequence([ids[row.start : row.stop] for row in one.rows], batch_first=True)  # [rows, time]; padded on the right,
    places = pad_sequence([positions[row.start : row.stop] for row in one.rows], batch_first=True)  # where no token reads it
    hidden = decoder(rows, places, causal)
    return torch.cat([state[: row.stop - row.start] for state, row in zip(hidden, one.rows, strict=True)])


def logits_chunks(one: Pass, vocab_size: int) -> Iterator[LogitsChunk]:
    """Yields the terms of a pass in order, in chunks bounded by `MAX_LOGITS`."""
    limit = max(1, MAX_LOGITS // vocab_size)
    rows: dict[tuple[int, float, int], int] = {}
    terms, start = tuple(one.terms), 0
    for end, term in enumerate(terms):
        if _row_key(term) not in rows and len(rows) == limit:
            yield _logits_chunk(one, terms[start:end], rows)
            rows, start = {}, end
        rows.setdefault(_row_key(term), len(rows))
    if rows:
        yield _logits_chunk(one, terms[start:], rows)


def score_chunk(decoder: Decoder, hidden: Tensor, chunk: LogitsChunk, *, entropy_slopes: bool = False) -> TermScores:
    """Returns the scores of a chunk's terms at their temperatures. `hidden` is that of the whole pass, [time, hidden]."""
    device = hidden.device
    temperatures = torch.tensor(chunk.temperatures, device=device, dtype=hidden.dtype).unsqueeze(1)
    states = hidden[torch.tensor(chunk.places, device=device)] / temperatures  # same as scaling the logits, but cheaper
    logits = decoder.logits(states)
    if chunk.allowed:
        logits = logits.masked_fill(~to_device(unpack_sets(chunk.allowed, logits.shape[-1]), device), FORBIDDEN)
    logprobs = logits.log_softmax(dim=-1)  # [rows, vocab]
    with torch.set_grad_enabled(entropy_slopes and torch.is_grad_enabled()):
        spread = logprobs.exp()
        entropy = -(spread * logprobs if entropy_slopes else spread.mul_(logprobs)).sum(dim=-1)  # [rows]
    rows = torch.tensor(chunk.rows, device=device)
    targets = torch.tensor([term.target for term in chunk.terms], device=device)
    return TermScores(logprobs[rows, targets], entropy[rows])


@torch.no_grad()
def pass_logprobs(decoder: Decoder, one: Pass, trunk: KeysValues, *, flat: bool) -> Tensor:
    """Returns the log-probabilities of all terms of a pass, [terms], without a gradient."""
    hidden = hidden_states(decoder, one, trunk, flat=flat)
    return torch.cat([score_chunk(decoder, hidden, chunk).logprobs for chunk in logits_chunks(one, decoder.shape.vocab_size)])


def _row_key(term: LossTerm) -> tuple[int, float, int]:
    return term.at, term.temperature, term.allowed


def _logits_chunk(one: Pass, terms: tuple[LossTerm, ...], rows: dict[tuple[int, float, int], int]) -> LogitsChunk:
    places, temperatures, _ = zip(*rows, strict=True)
    sets = [at for *_, at in rows]
    allowed = tuple(b"" if at < 0 else one.allowed[at] for at in sets) if max(sets) >= 0 else ()
    return LogitsChunk(terms, places, temperatures, tuple(rows[_row_key(term)] for term in terms), allowed)
