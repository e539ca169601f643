"""The tokens that each sampled token was chosen from, replayed from the grammar of its reply or from what its caller left out."""

from pathlib import Path

from penstock.engines.embedded.engine import end_ids
from penstock.engines.embedded.grammars import FixedChoice, GrammarCompiler, allowed_rows
from penstock.engines.token_sets import pack_set
from penstock.errors import PenstockError
from penstock.records import Step
from penstock.train.sequences import ReplayedStep

MAX_SHARED_SETS = 4096
"""Sets that are kept so that equal ones share their memory: most tokens of JSON are chosen from one of few sets."""


class AllowedReplay:
    """Replays steps of one model."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._grammars, self._ends = GrammarCompiler(folder, vocab_size), end_ids(folder)
        self._vocab_size = vocab_size
        self._sets: dict[bytes, bytes] = {}

    def __call__(self, step: Step) -> ReplayedStep:
        if step.sampling.biased:
            return self._fixed(step)
        if step.sampling.grammar is None:
            return ReplayedStep()
        try:
            state = self._grammars.start(step.sampling.grammar, self._ends.union(step.sampling.stop_ids))
        except PenstockError:
            return ReplayedStep(problem="grammar_unknown")
        sets: list[bytes] = []
        for token_id in step.completion_ids:
            (row,) = allowed_rows([state], self._vocab_size)
            if state.problem or token_id >= self._vocab_size or not row[token_id]:
                return ReplayedStep(problem="not_allowed")
            sets.append(self._shared(pack_set(row)))
            state.advance(token_id)
        return ReplayedStep(tuple(sets))

    def _fixed(self, step: Step) -> ReplayedStep:
        allowed = FixedChoice(step.sampling, self._vocab_size).allowed
        if not all(token_id < self._vocab_size and allowed[token_id] for token_id in step.completion_ids):
            return ReplayedStep(problem="not_allowed")
        return ReplayedStep((self._shared(pack_set(allowed)),) * len(step.completion_ids))

    def _shared(self, packed: bytes) -> bytes:
        if len(self._sets) >= MAX_SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(packed, packed)
