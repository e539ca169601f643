"""Which tokens the grammar of a reply allows next, by llguidance: while it is sampled, and again when it is trained or checked.

The engine and the trainer ask the same compiled grammar about the same tokens, so they normalise over the same sets.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import EngineError
from penstock.records import ReplyGrammar, Sampling

KEPT_GRAMMARS = 64
"""Compiled grammars that are kept; each may take some megabytes."""
STATES_PER_LEXER = 4
"""From this many running replies of one grammar on, it is compiled once more, so that two processors can share the work."""
MAX_LEXERS = min(8, max(1, (os.cpu_count() or 1) // 2))
COMPILED_ONCE_S = 0.1
"""A grammar that takes longer is compiled once: replies would wait for it."""
_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = (r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{length}}}" for length in (*range(8, 17), 20, 30)), f"{_TEXT}+")
"""Classes of tokens. llguidance allows one as a whole where a string has room for its longest token, and otherwise tries its tokens
one by one; each token belongs to the first class that holds it. With its own classes, of lengths up to 10 and 30, masks inside
strings of bounded length take three times as long. No mask depends on them."""


class CompiledGrammar:
    """A grammar, compiled as often as several threads may ask it at once.

    The states of one compilation share its lexer, and wait for each other there.
    """

    def __init__(self, compile_once: Callable[[], Any]) -> None:
        self._compile = compile_once
        started = time.perf_counter()
        self._matchers = [compile_once()]
        self._most = MAX_LEXERS if time.perf_counter() - started < COMPILED_ONCE_S else 1
        self._states = [WeakSet["GrammarState"]()]

    def start(self) -> "GrammarState":
        counts = list(map(len, self._states))
        lexer = counts.index(min(counts))
        if counts[lexer] >= STATES_PER_LEXER and len(counts) < self._most:
            lexer = len(counts)
            self._matchers.append(self._compile())
            self._states.append(WeakSet())
        state = GrammarState(self._matchers[lexer].deep_copy(), lexer)
        self._states[lexer].add(state)
        return state


class GrammarState:
    """A reply so far, and what may follow."""

    def __init__(self, matcher: Any, lexer: int = 0) -> None:
        self.matcher, self.lexer = matcher, lexer

    @property
    def problem(self) -> str:
        """Why nothing can follow; empty if all is well."""
        return self.matcher.get_error().split("\n")[0] if self.matcher.is_error() else ""

    def advance(self, token_id: int) -> bool:
        """Add a token; False if it is not allowed."""
        return self.matcher.consume_token(token_id)


class FixedChoice:
    """The same tokens may follow whatever was said: those that a caller's `logit_bias` leaves."""

    problem = ""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self.allowed = np.full(vocab_size, not sampling.only_ids)
        self.allowed[list(sampling.only_ids)] = True
        self.allowed[list(sampling.banned_ids)] = False
        packed = np.packbits(self.allowed, bitorder="little")
        self.bits = np.pad(packed, (0, -len(packed) % 4)).view(np.int32)

    def advance(self, token_id: int) -> bool:
        return bool(self.allowed[token_id])


ReplyState = GrammarState | FixedChoice
"""Finds what may follow a reply so far."""


class GrammarCompiler:
    """Grammars for the tokenizer of one model folder. Methods may be called from any thread."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._file, self.vocab_size = folder / "tokenizer.json", vocab_size
        self._lock = Lock()
        self._compile = lru_cache(KEPT_GRAMMARS)(self._compiled)
        self._tokenizer = lru_cache(4)(self._read_tokenizer)
        self._added: frozenset[int] | None = None

    def start(self, grammar: ReplyGrammar, stop_ids: Collection[int]) -> GrammarState:
        """The state before the first token. Of `stop_ids`, added tokens end the reply, where the grammar allows it to end.

        EngineError if the grammar cannot be compiled. The first call takes about a second for each 50,000 tokens.
        """
        with self._lock:
            return self._compile(grammar.lark, self._ends(stop_ids)).start()

    def _ends(self, stop_ids: Collection[int]) -> tuple[int, ...]:
        if self._added is None:
            try:
                entries = json.loads(self._file.read_text(encoding="utf-8")).get("added_tokens", [])
            except (OSError, ValueError) as cause:
                raise EngineError(f"replies cannot be constrained without the model's tokenizer ({cause})") from cause
            self._added = frozenset(entry["id"] for entry in entries)
        return tuple(sorted(self._added.intersection(stop_ids)))

    def _compiled(self, lark: str, ends: tuple[int, ...]) -> CompiledGrammar:
        def compile_once() -> Any:
            import llguidance

            matcher = llguidance.LLMatcher(self._tokenizer(ends), lark, log_level=0)
            if matcher.is_error():
                raise EngineError(f"the grammar of the reply cannot be compiled: {matcher.get_error()}")
            return matcher

        return CompiledGrammar(compile_once)

    def _read_tokenizer(self, ends: tuple[int, ...]) -> Any:
        try:
            import llguidance
        except ImportError as cause:
            raise EngineError("constrained replies need llguidance; run: pip install llguidance") from cause
        if not ends:
            raise EngineError("the model has no token that ends a reply, so its replies cannot be constrained")
        try:
            text = self._file.read_text(encoding="utf-8")
            return llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=list(ends), slices=list(SLICES))
        except Exception as cause:  # the library raises errors of many kinds
            raise EngineError(f"this tokenizer cannot be used to constrain replies: {cause}") from cause


FEW_STATES = 8
"""Up to here the calling thread is faster than several others, which must be woken."""


@cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor(MAX_LEXERS)


def fill_rows(bits: NDArray[np.int32], states: Sequence[tuple[int, ReplyState]]) -> None:
    """Write what may follow in each state to its row of `bits` [rows, words], the lowest bit of a word first."""
    row_bytes, first = bits.shape[1] * 4, bits.ctypes.data
    bound: list[tuple[int, GrammarState]] = []
    for row, state in states:
        if isinstance(state, FixedChoice):
            bits[row] = state.bits
        else:
            bound.append((row, state))
    if len(bound) > FEW_STATES and any(state.lexer for _, state in bound):
        bound.sort(key=lambda each: each[1].lexer)  # a thread takes neighbours
        _executor().unsafe_compute_mask_ptr([(state.matcher, row) for row, state in bound], first, row_bytes, len(bits))
        return
    for row, state in bound:
        state.matcher.unsafe_compute_mask_ptr(first + row * row_bytes, row_bytes)


def allowed_rows(states: Sequence[ReplyState], vocab_size: int) -> NDArray[np.bool_]:
    """What may follow in each state, [states, vocab]."""
    bits = np.zeros((len(states), (vocab_size + 31) // 32), np.int32)
    fill_rows(bits, list(enumerate(states)))
    return np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def forbid(logits: Tensor, states: Sequence[ReplyState | None]) -> None:
    """Set the logits [rows, vocab] to -inf where a row's grammar does not allow the token."""
    bound = [(row, state) for row, state in enumerate(states) if state is not None]
    if not bound:
        return
    allowed = allowed_rows([state for _, state in bound], logits.shape[-1])
    forbidden = torch.from_numpy(~allowed).to(logits.device)  # pyright: ignore[reportUnknownMemberType]
    if len(bound) == len(states):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        rows = [row for row, _ in bound]
        logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))
