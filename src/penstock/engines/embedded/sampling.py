"""Sampling: draws the next token of every running request from its logits, with its log-probability.

Two log-probabilities come with each token. `logprobs` is under the distribution that the token was really drawn from, after
temperature, top-k, top-p and min-p; `full_logprobs` is under the plain softmax. The trainer takes the first as the behaviour
probability and computes its own at the same temperature: an importance ratio is only correct against the distribution that
sampled, and a ratio of two tempered probabilities starts at 1 for fresh tokens. The second is for audits, which need not
know how a request was sampled, and for the KL to a reference policy. A greedy token had no alternative: its log-probability is 0.

Randomness is one uniform number per token, from the request's own generator, pushed through the inverse of the cumulative
distribution: what a request draws does not depend on who shares its batch.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import EngineError
from penstock.records import ReplyGrammar, Sampling

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
