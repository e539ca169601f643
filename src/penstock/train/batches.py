"""Packs sequences into a batch: lays out shared prefixes once, in passes of bounded size.

Sequences are sorted by their tokens, so that each shares its longest prefix with the one before it. A *row* holds the tokens that
a sequence adds to its pass. The earlier tokens are in rows above and, if a set needs several passes, in the *trunk*, which is
forwarded once for all passes:

    trunk   [system text, tools, examples]
    pass 1  [question A, reply, tool result, answer]      row 1
                       [reply, tool result, answer]       row 2, after row 1's question
    pass 2  [question B, …]                               row 1

The last token of a sequence is predicted but never read, so it is not laid out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.records import Sequence

if TYPE_CHECKING:  # pages that show credit import this without torch
    from torch import Tensor

CPU_TOKENS_PER_PASS = 1024
"""Enough for a CPU: larger passes only take more memory there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """Consecutive tokens of a pass. Each reads the trunk, the spans, and the row up to itself."""

    start: int
    stop: int
    spans: tuple[tuple[int, int], ...] = ()
    """The sequence's tokens between trunk and row, in order: (start, stop) of each range in the pass."""


class LossTerm(NamedTuple):
    """The term of one trained token in the loss."""

    at: int
    """Index in the pass of the hidden state that predicts the token."""
    target: int
    temperature: float
    logprob: float
    """Under the distribution that the engine sampled the token from."""
    advantage: float
    weight: float
    token: int = -1
    """Which token of the batch's sequences it is, counted over all of them."""
    allowed: int = -1
    """Index in `Pass.allowed` of the tokens that it was chosen from; -1 if these are all."""


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """The terms of a pass, sorted by index, then temperature. Each field of `LossTerm` is an array, [terms].

    Making an object for each of tens of thousands of terms takes longer than a GPU needs for some passes.
    """

    at: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float64]
    logprob: npt.NDArray[np.float64]
    advantage: npt.NDArray[np.float64]
    weight: npt.NDArray[np.float64]
    token: npt.NDArray[np.int64]
    allowed: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[LossTerm]:
        return map(LossTerm._make, zip(*(getattr(self, name).tolist() for name in LossTerm._fields), strict=True))


_NO_INTEGERS, _NO_NUMBERS = np.zeros(0, np.int64), np.zeros(0)
NO_TERMS = LossTerms(_NO_INTEGERS, _NO_INTEGERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_INTEGERS, _NO_INTEGERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Tokens that go through the model in one call."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    rows: tuple[PassRow, ...]
    terms: LossTerms = NO_TERMS
    allowed: tuple[bytes, ...] = ()
    """Sets of tokens; see `Sequence.allowed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSet:
    """Passes that read the same trunk. No hidden state of the trunk predicts a term."""

    trunk: tuple[int, ...]
    passes: tuple[Pass, ...]


class ValueTargets(NamedTuple):
    """What the value head is trained on with a batch's first update. Tokens are in the order of the sequences."""

    states: "Tensor"
    """[trained tokens, hidden]"""
    returns: "Tensor"
    """[trained tokens]"""
    error: float
    """Mean squared, before that update."""


class TokenOwners(NamedTuple):
    """Per token of a batch's sequences, [tokens]: numbers that are the same for all trained tokens of one."""

    sequence: npt.NDArray[np.int64]
    turn: npt.NDArray[np.int64]
    """Consecutive tokens of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one update."""

    pass_sets: tuple[PassSet, ...]
    rollouts: int
    """The divisor of the loss; includes rollouts without a trained token."""
    flat: bool
    """Whether every row is a whole sequence that reads only itself."""
    sequences: tuple[Sequence, ...]
    """What was packed."""
    tokens_per_pass: int
    value_targets: "ValueTargets | None" = None

    @property
    def trained_tokens(self) -> int:
        return sum(len(one.terms) for pass_set in self.pass_sets for one in pass_set.passes)

    @property
    def forwarded_tokens(self) -> int:
        """Tokens that go through the model; a shared prefix counts as often as it is forwarded."""
        return sum(len(pass_set.trunk) + sum(len(one.ids) for one in pass_set.passes) for pass_set in self.pass_sets)

    def repacked(self, tokens_per_pass: int) -> "Batch":
        """Returns the same terms in passes of another size, and thus in another order."""
        made = pack(self.sequences, rollouts=self.rollouts, tokens_per_pass=tokens_per_pass, shared_prefix=not self.flat)
        return replace(made, value_targets=self.value_targets)

    def term_numbers(self) -> list[int]:
        """Returns which token each term is, counted over all sequences, in the order of computation."""
        return self.columns().token.tolist()

    def columns(self) -> LossTerms:
        """Returns all terms, in the order of computation."""
        parts = [one.terms for pass_set in self.pass_sets for one in pass_set.passes]
        if not parts:
            return NO_TERMS
        return LossTerms(*(np.concatenate([getattr(part, name) for part in parts]) for name in LossTerm._fields))

    def recomputed(self) -> npt.NDArray[np.bool_] | None:
        """Returns which terms have no known log-probability, in the order of computation; None if all have one."""
        if not any(sequence.recomputed for sequence in self.sequences):
            return None
        flags = [sequence.recomputed or (False,) * len(sequence.token_ids) for sequence in self.sequences]
        return np.concatenate(flags)[self.columns().token]

    def owners(self) -> "TokenOwners":
        """Returns which sequence, and which turn of it, each token is of; -1 where not trained."""
        sequences, turns = list[npt.NDArray[np.int64]](), list[npt.NDArray[np.int64]]()
        turn = 0
        for number, sequence in enumerate(self.sequences):
            trained = np.array(sequence.trained, bool)
            steps = np.array(sequence.steps or np.where(trained, 0, -1), np.int64)
            begins = trained & np.concatenate(([True], (steps[1:] != steps[:-1]) | ~trained[:-1]))
            turns.append(np.where(trained, turn - 1 + np.cumsum(begins), -1))
            sequences.append(np.where(trained, number, -1))
            turn += int(begins.sum())
        return TokenOwners(np.concatenate(sequences or [_NO_INTEGERS]), np.concatenate(turns or [_NO_INTEGERS]))


def pack(sequences: Iterable[Sequence], *, rollouts: int, tokens_per_pass: int, shared_prefix: bool = True) -> Batch:
    """Lays out `sequences` as one pass set, or as one per group, whichever forwards fewer tokens.

    A pass holds at most `tokens_per_pass` tokens, or a single row. The same sequences in the same order give the same batch.
    """
    given = tuple(sequences)
    firsts = accumulate((len(sequence.token_ids) for sequence in given), initial=0)
    numbered = [_Numbered(sequence, first) for sequence, first in zip(given, firsts, strict=False)]
    if not shared_prefix:
        layouts = _flat(numbered, tokens_per_pass)
    else:
        groups: dict[str, list[_Numbered]] = {}
        for each in numbered:
            groups.setdefault(each.sequence.group_id, []).append(each)
        together = [_lay_out(numbered, tokens_per_pass)] if given else []
        apart = [_lay_out(group, tokens_per_pass) for group in groups.values()] if len(groups) > 1 else together
        layouts = min(together, apart, key=lambda sets: sum(layout.tokens for layout in sets))
    return Batch(
        pass_sets=tuple(layout.finish() for layout in layouts),
        rollouts=rollouts,
        flat=not shared_prefix,
        sequences=given,
        tokens_per_pass=tokens_per_pass,
    )


class _Numbered(NamedTuple):
    sequence: Sequence
    first: int
    """The number of its first token, counted over all sequences."""


class _SetLayout(NamedTuple):
    """A pass set under construction: its terms are made only once it is chosen."""

    trunk: tuple[int, ...]
    passes: "list[_PassLayout]"

    @property
    def tokens(self) -> int:
        return len(self.trunk) + sum(len(one.ids) for one in self.passes)

    def finish(self) -> PassSet:
        return PassSet(trunk=self.trunk, passes=tuple(one.finish() for one in self.passes))


def _lay_out(sequences: Iterable[_Numbered], limit: int) -> _SetLayout:
    ordered = sorted(sequences, key=lambda each: each.sequence.token_ids)
    passes = _passes(ordered, 0, limit)
    if len(passes) == 1:
        return _SetLayout((), passes)
    first, last = ordered[0].sequence.token_ids, ordered[-1].sequence.token_ids
    trunk = min(_common_prefix(first, last), *(each.sequence.trained.index(True) - 1 for each in ordered))
    return _SetLayout(first[:trunk], _passes(ordered, trunk, limit))


def _passes(ordered: list[_Numbered], trunk: int, limit: int) -> "list[_PassLayout]":
    done = [_PassLayout(trunk)]
    for each in ordered:
        new = len(each.sequence.token_ids) - 1 - done[-1].shared(each.sequence)
        if done[-1].ids and new and len(done[-1].ids) + new > limit:
            done.append(_PassLayout(trunk))
        done[-1].add(each)
    return done


def _flat(sequences: Iterable[_Numbered], limit: int) -> list[_SetLayout]:
    """Lays out whole sequences, longest first, as many per pass as fit when padded to the same length."""
    done: list[_PassLayout] = []
    room = 0
    for each in sorted(sequences, key=lambda each: -len(each.sequence.token_ids)):
        if room <= 0:
            done.append(_PassLayout(0))
            room = max(1, limit // (len(each.sequence.token_ids) - 1))
        done[-1].add(each, alone=True)
        room -= 1
    return [_SetLayout((), done)] if done else []


class _PassLayout:
    """A pass under construction, below a trunk of the given length."""

    def __init__(self, trunk: int) -> None:
        self.trunk = trunk
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.rows: list[PassRow] = []
        self.placed: list[tuple[_Numbered, list[tuple[int, int]]]] = []
        """Each sequence with the ranges of the pass that hold its tokens after the trunk."""
        self.above: tuple[int, ...] = ()
        self.spans: list[tuple[int, int]] = []
        """Ranges of the pass that hold the tokens of `above`, the last added sequence, after the trunk."""

    def shared(self, sequence: Sequence) -> int:
        """Returns how many of the sequence's tokens are already laid out, including the trunk."""
        return max(self.trunk, _common_prefix(self.above, sequence.token_ids[:-1]))

    def add(self, each: _Numbered, *, alone: bool = False) -> None:
        """Lays out the tokens that a sequence does not share with the one before it; all of them if `alone`."""
        sequence = each.sequence
        known = 0 if alone else self.shared(sequence)
        spans = _cut(self.spans, known - self.trunk)
        start, inputs = len(self.ids), sequence.token_ids[:-1]
        self.ids += inputs[known:]
        self.positions += range(known, len(inputs))
        if len(self.ids) > start:
            self.rows.append(PassRow(start=start, stop=len(self.ids), spans=tuple(spans)))
            spans.append((start, len(self.ids)))
        self.above, self.spans = inputs, spans
        self.placed.append((each, spans))

    def finish(self) -> Pass:
        """Returns the pass, with its terms in the order of computation."""
        sets: dict[bytes, int] = {}
        parts = [_terms(each, self.trunk, spans, sets) for each, spans in self.placed]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.lexsort((columns[-1], columns[2], columns[0]))
        terms = LossTerms(*(column[order] for column in columns))
        rows = tuple(self.rows)
        return Pass(ids=tuple(self.ids), positions=tuple(self.positions), rows=rows, terms=terms, allowed=tuple(sets))


def _terms(each: _Numbered, trunk: int, spans: list[tuple[int, int]], sets: dict[bytes, int]) -> "tuple[npt.NDArray[Any], ...]":
    """Returns the fields of `LossTerms` for one sequence, in the order of its tokens. New sets of tokens are added to `sets`."""
    sequence = each.sequence
    flags = sequence.trained[1:]
    trained = np.flatnonzero(flags)  # indices of the tokens that predict
    at = np.concatenate([np.arange(start, stop) for start, stop in spans])
    targets = np.fromiter(compress(sequence.token_ids[1:], flags), np.int64, len(trained))
    columns = (sequence.temperatures, sequence.logprobs, sequence.advantages)
    numbers = (np.fromiter(compress(column[1:], flags), np.float64, len(trained)) for column in columns)
    allowed = np.full(len(trained), -1)
    if sequence.allowed:
        limits = [sequence.allowed[place + 1] for place in trained.tolist()]
        allowed = np.array([sets.setdefault(limit, len(sets)) if limit else -1 for limit in limits])
    weights, tokens = np.full(len(trained), sequence.weight), trained + 1 + each.first
    return at[trained - trunk], targets, *numbers, weights, tokens, allowed


def _cut(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Returns spans that cover the first `length` tokens."""
    kept: list[tuple[int, int]] = []
    for start, stop in spans:
        if length <= 0:
            break
        kept.append((start, min(stop, start + length)))
        length -= stop - start
    return kept


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the length of the longest common prefix. Bisects, so that tuple equality compares in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
