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
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.records import Sequence

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

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[LossTerm]:
        return map(LossTerm._make, zip(*(getattr(self, name).tolist() for name in LossTerm._fields), strict=True))


_NO_INTEGERS, _NO_NUMBERS = np.zeros(0, np.int64), np.zeros(0)
NO_TERMS = LossTerms(_NO_INTEGERS, _NO_INTEGERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Tokens that go through the model in one call."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    rows: tuple[PassRow, ...]
    terms: LossTerms = NO_TERMS


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSet:
    """Passes that read the same trunk. No hidden state of the trunk predicts a term."""

    trunk: tuple[int, ...]
    passes: tuple[Pass, ...]


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

    @property
    def trained_tokens(self) -> int:
        return sum(len(one.terms) for pass_set in self.pass_sets for one in pass_set.passes)

    @property
    def forwarded_tokens(self) -> int:
        """Tokens that go through the model; a shared prefix counts as often as it is forwarded."""
        return sum(len(pass_set.trunk) + sum(len(one.ids) for one in pass_set.passes) for pass_set in self.pass_sets)

    def repacked(self, tokens_per_pass: int) -> "Batch":
        """Returns the same terms in passes of another size, and thus in another order."""
        return pack(self.sequences, rollouts=self.rollouts, tokens_per_pass=tokens_per_pass, shared_prefix=not self.flat)

    def term_numbers(self) -> list[int]:
        """Returns which trained token each term belongs to, counted over all sequences, in the order of computation."""
        counter = count()
        numbered = [replace(s, advantages=tuple(float(next(counter)) for _ in s.advantages)) for s in self.sequences]
        batch = replace(self, sequences=tuple(numbered)).repacked(self.tokens_per_pass)
        return [int(term.advantage) for pass_set in batch.pass_sets for one in pass_set.passes for term in one.terms]


def pack(sequences: Iterable[Sequence], *, rollouts: int, tokens_per_pass: int, shared_prefix: bool = True) -> Batch:
    """Lays out `sequences` as one pass set, or as one per group, whichever forwards fewer tokens.

    A pass holds at most `tokens_per_pass` tokens, or a single row. The same sequences in the same order give the same batch.
    """
    given = tuple(sequences)
    if not shared_prefix:
        layouts = _flat(given, tokens_per_pass)
    else:
        groups: dict[str, list[Sequence]] = {}
        for sequence in given:
            groups.setdefault(sequence.group_id, []).append(sequence)
        together = [_lay_out(given, tokens_per_pass)] if given else []
        apart = [_lay_out(group, tokens_per_pass) for group in groups.values()]
        layouts = min(together, apart, key=lambda sets: sum(layout.tokens for layout in sets))
    return Batch(
        pass_sets=tuple(layout.finish() for layout in layouts),
        rollouts=rollouts,
        flat=not shared_prefix,
        sequences=given,
        tokens_per_pass=tokens_per_pass,
    )


class _SetLayout(NamedTuple):
    """A pass set under construction: its terms are made only once it is chosen."""

    trunk: tuple[int, ...]
    passes: "list[_PassLayout]"

    @property
    def tokens(self) -> int:
        return len(self.trunk) + sum(len(one.ids) for one in self.passes)

    def finish(self) -> PassSet:
        return PassSet(trunk=self.trunk, passes=tuple(one.finish() for one in self.passes))


def _lay_out(sequences: Iterable[Sequence], limit: int) -> _SetLayout:
    ordered = sorted(sequences, key=lambda sequence: sequence.token_ids)
    passes = _passes(ordered, 0, limit)
    if len(passes) == 1:
        return _SetLayout((), passes)
    shared = _common_prefix(ordered[0].token_ids, ordered[-1].token_ids)
    trunk = min(shared, *(sequence.trained.index(True) - 1 for sequence in ordered))
    return _SetLayout(ordered[0].token_ids[:trunk], _passes(ordered, trunk, limit))


def _passes(ordered: list[Sequence], trunk: int, limit: int) -> "list[_PassLayout]":
    done = [_PassLayout(trunk)]
    for sequence in ordered:
        new = len(sequence.token_ids) - 1 - done[-1].shared(sequence)
        if done[-1].ids and new and len(done[-1].ids) + new > limit:
            done.append(_PassLayout(trunk))
        done[-1].add(sequence)
    return done


def _flat(sequences: Iterable[Sequence], limit: int) -> list[_SetLayout]:
    """Lays out whole sequences, longest first, as many per pass as fit when padded to the same length."""
    done: list[_PassLayout] = []
    room = 0
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.token_ids)):
        if room <= 0:
            done.append(_PassLayout(0))
            room = max(1, limit // (len(sequence.token_ids) - 1))
        done[-1].add(sequence, alone=True)
        room -= 1
    return [_SetLayout((), done)] if done else []


class _PassLayout:
    """A pass under construction, below a trunk of the given length."""

    def __init__(self, trunk: int) -> None:
        self.trunk = trunk
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.rows: list[PassRow] = []
        self.placed: list[tuple[Sequence, list[tuple[int, int]]]] = []
        """Each sequence with the ranges of the pass that hold its tokens after the trunk."""
        self.above: tuple[int, ...] = ()
        self.spans: list[tuple[int, int]] = []
        """Ranges of the pass that hold the tokens of `above`, the last added sequence, after the trunk."""

    def shared(self, sequence: Sequence) -> int:
        """Returns how many of the sequence's tokens are already laid out, including the trunk."""
        return max(self.trunk, _common_prefix(self.above, sequence.token_ids[:-1]))

    def add(self, sequence: Sequence, *, alone: bool = False) -> None:
        """Lays out the tokens that `sequence` does not share with the one before it; all of them if `alone`."""
        known = 0 if alone else self.shared(sequence)
        spans = _cut(self.spans, known - self.trunk)
        start, inputs = len(self.ids), sequence.token_ids[:-1]
        self.ids += inputs[known:]
        self.positions += range(known, len(inputs))
        if len(self.ids) > start:
            self.rows.append(PassRow(start=start, stop=len(self.ids), spans=tuple(spans)))
            spans.append((start, len(self.ids)))
        self.above, self.spans = inputs, spans
        self.placed.append((sequence, spans))

    def finish(self) -> Pass:
        """Returns the pass, with its terms in the order of computation."""
        parts = [_terms(sequence, self.trunk, spans) for sequence, spans in self.placed]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.lexsort((columns[2], columns[0]))
        terms = LossTerms(*(column[order] for column in columns))
        return Pass(ids=tuple(self.ids), positions=tuple(self.positions), rows=tuple(self.rows), terms=terms)


def _terms(sequence: Sequence, trunk: int, spans: list[tuple[int, int]]) -> "tuple[npt.NDArray[Any], ...]":
    """Returns the fields of `LossTerms` for one sequence, in the order of its tokens."""
    trained = np.flatnonzero(sequence.trained[1:])  # indices of the tokens that predict
    at = np.concatenate([np.arange(start, stop) for start, stop in spans])
    targets = np.array(sequence.token_ids[1:])[trained]
    columns = (sequence.temperatures, sequence.logprobs, sequence.advantages)
    numbers = (np.array(column[1:], np.float64)[trained] for column in columns)
    return at[trained - trunk], targets, *numbers, np.full(len(trained), sequence.weight)


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
