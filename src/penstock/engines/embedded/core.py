"""Continuous batching without threads: requests wait for a slot, are prefilled together and decoded together.

Each `step` admits the requests that fit, runs at most one prefill pass, and samples one token for every request whose prompt is
computed, so that a long prompt never blocks requests that are already decoding. The context of a request is a path of the prefix
tree, shared with every request that has the same tokens, plus its own tail. When a request finishes, its tail is moved to
the tree, where the next turn of its conversation finds it.

No tokens are lost when memory runs short or the weights change: a request goes back to the front of the queue with the tokens
that it has, and is prefilled again.
"""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.engines.embedded.attention import DecodeAttention, PrefillAttention
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.kv_cache import KeyValues, PrefixTree, Segment, TailCache
from penstock.engines.embedded.lora import AdapterSlots
from penstock.engines.embedded.sampling import DrawnTokens, MostLikely, ReplyState, forbid, most_likely, sample
from penstock.engines.token_sets import pack_set
from penstock.errors import ConfigError
from penstock.records import Finish, Sampling, TokenLogprobs

MAX_ABSORBED = 384
"""At most this many tokens at the end of a path are copied to the tail: all tails are read at once, but segments one by one.

Tokens that several requests read count once per request: reading a segment once for all of them is cheaper than many copies.
"""

MAX_TAIL = 512
"""A tail of this many tokens is moved to the tree, because all tails are read at the width of the longest."""

MIN_TAIL = 8

UNEVEN_TAIL = 64
"""So is a tail of this many tokens, if the others are so short that most of what is read would be padding."""

STOP_MARGIN = 16
"""Tokens searched for a stop string beyond its length in bytes: some tokens, such as special ones, have no text."""


@dataclass(eq=False, slots=True)
class Request:
    """One request and the tokens sampled for it so far."""

    key: int
    """Requests are served in this order."""
    tokens: list[int]
    """Prompt and reply so far; the last one has not been through the model yet."""
    prompt_length: int
    sampling: Sampling
    stop_ids: frozenset[int]
    uniform: Callable[[], float]
    """The request's own random numbers in [0, 1)."""
    policy: str = ""
    """Whose adapter computes it."""
    grammar: ReplyState | None = None
    """What may follow `tokens`; None if anything may."""


class DrawnChunk(NamedTuple):
    """Tokens of one request, of one step or of several."""

    request: Request
    ids: list[int]
    logprobs: list[float]
    full_logprobs: list[float]
    finish: Finish | None = None
    problem: str = ""
    """Why the request cannot continue; with finish "error" only."""
    kept: tuple[bytes, ...] = ()
    """See `Step.kept`."""
    most_likely: tuple[TokenLogprobs, ...] = ()
    """See `Step.most_likely`."""


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request that has a slot and a path in the tree."""

    request: Request
    slot: int
    leaf: Segment
    """End of its path; held, so that the tree keeps the path."""
    base: int = 0
    """Positions before this are read from the path, the others from the tail."""

    @property
    def tail(self) -> int:
        """Tokens in its tail: all that went through the model, from `base` on."""
        return len(self.request.tokens) - 1 - self.base


def _longest_tail(slots: int, cache_tokens: int) -> int:
    """A power of two such that all tails together take at most a quarter of the cache; ConfigError if that is too little."""
    share = cache_tokens // (4 * slots)
    if share < MIN_TAIL:
        least = 4 * slots * MIN_TAIL
        raise ConfigError(f"engine.cache_tokens = {cache_tokens} is too little for {slots} slots; set it to {least} or more")
    return min(MAX_TAIL, 1 << (share.bit_length() - 1))


class EngineCore:
    """Slots, prefix tree, tails and the queue of waiting requests. Not thread-safe: one thread owns it."""

    def __init__(
        self, decoder: Decoder, *, slots: int, cache_tokens: int, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        weight = decoder.embed.weight
        self.decoder, self.decode_text = decoder, decode
        self.adapters = AdapterSlots(decoder)
        self._device, self._dtype = weight.device, weight.dtype
        self.pass_tokens = 512 if self._device.type == "cpu" else 2048
        self.slots = slots
        self._longest_tail = _longest_tail(slots, cache_tokens)
        self.tree = PrefixTree(capacity=cache_tokens - slots * self._longest_tail, longest=self.pass_tokens)
        self.tails = TailCache(decoder.shape, slots=slots, device=self._device, dtype=self._dtype)
        self.waiting: deque[Request] = deque()
        self.planned: list[ActiveRequest] = []
        self.running: list[ActiveRequest] = []
        self._free = list(range(slots))
        self._attend: DecodeAttention | None = None
        """None if the running requests, or the segments they read, have changed since the last step."""

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.waiting or self.planned or self.running)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Remove a request and free its slot. Does nothing if it has already finished."""
        if request in self.waiting:
            self.waiting.remove(request)
        for active in [*self.planned, *self.running]:
            if active.request is request:
                self._remove(active)

    @property
    def capacity(self) -> int:
        """The longest context that fits into the cache."""
        return self.tree.capacity

    def drain(self) -> list[DrawnChunk]:
        """Read what is queued, so that the weights may change: here, nothing ever is."""
        return []

    def reset(self, policies: Collection[str] | None = None) -> None:
        """Drop all keys and values, or those of some policies.

        Active requests keep their tokens and go back to the front of the queue, oldest first.
        """
        for active in sorted([*self.planned, *self.running], key=lambda active: -active.request.key):
            if policies is None or active.request.policy in policies:
                self._requeue(active)
        if policies is None:
            self.tree.clear()
            self.tails.clear()
        else:
            for policy in policies:
                self.tree.drop(self.adapters.slot(policy))

    def drop(self) -> list[Request]:
        """After an error, drop the active requests and all keys and values; returns those requests."""
        lost = [active.request for active in [*self.planned, *self.running]]
        self.planned, self.running, self._attend = [], [], None
        self._free = list(range(self.slots))
        self.tree.clear()
        self.tails.clear()
        return lost

    def step(self) -> list[DrawnChunk]:
        """Admit, prefill one pass, sample one token for each running request."""
        with torch.inference_mode():
            self._admit()
            self._prefill()
            self._fold_tails()
            return self._sample() if self.running else []

    def _admit(self) -> None:
        while self.waiting and self._free:
            leaf = self.tree.plan(self.waiting[0].tokens[:-1], self.adapters.slot(self.waiting[0].policy))
            if leaf is None:
                return  # no room until another request finishes
            self.planned.append(ActiveRequest(self.waiting.popleft(), self._free.pop(0), leaf))

    def _prefill(self) -> None:
        segments = self._next_segments()
        if segments:
            tokens = [token for segment in segments for token in segment.tokens]
            positions = [position for segment in segments for position in range(segment.start, segment.end)]
            self._choose([segment.adapter for segment in segments for _ in segment.tokens])
            attend = PrefillAttention(self.decoder.shape, segments, device=self._device, dtype=self._dtype)
            self.decoder(self._tensor([tokens]), self._tensor([positions]), attend)
            attend.commit()
        ready = [active for active in self.planned if all(segment.ready for segment in active.leaf.path())]
        if ready:
            readers = Counter(segment for active in [*self.planned, *self.running] for segment in active.leaf.path())
            for active in ready:
                self._copy_to_tail(active, readers)
            self.planned = [active for active in self.planned if active not in ready]
            self.running += ready
            self._attend = None

    def _next_segments(self) -> list[Segment]:
        """Planned segments whose ancestors are computed, in the order of their requests, as many as fit into one pass."""
        chosen: dict[Segment, None] = {}
        room = self.pass_tokens
        for active in self.planned:
            segment = next((segment for segment in active.leaf.path() if not segment.ready), None)
            if segment is None or segment in chosen:
                continue
            if len(segment.tokens) > room:
                break
            chosen[segment] = None
            room -= len(segment.tokens)
        return sorted(chosen, key=lambda segment: _order(segment.path()))

    def _copy_to_tail(self, active: ActiveRequest, readers: "Counter[Segment]") -> None:
        most = min(MAX_ABSORBED, 3 * self._longest_tail // 4)
        active.base = active.leaf.end
        for segment in reversed(active.leaf.path()):
            if len(segment.tokens) * readers[segment] > most or active.leaf.end - segment.start > most:
                break
            active.base = segment.start
        for segment in active.leaf.path():
            if segment.start >= active.base and isinstance(segment.kv, KeyValues):
                self.tails.load(active.slot, segment.start - active.base, segment.kv)

    def _fold_tails(self) -> None:
        """Move full tails to the tree, and those that make the padding of the others too wide."""
        total = sum(active.tail for active in self.running)
        for active in sorted(self.running, key=lambda active: -active.tail):
            full = active.tail >= self._longest_tail
            if not full and (active.tail < UNEVEN_TAIL or active.tail * len(self.running) <= 2 * total):
                return
            while active in self.running and not self._fold(active) and full:
                self._requeue(max([*self.planned, *self.running], key=lambda active: active.request.key))
            total = sum(active.tail for active in self.running)

    def _fold(self, active: ActiveRequest) -> bool:
        """Move the tail to the tree and begin a new one; False if the tree has no room."""
        tokens = active.request.tokens[active.leaf.end : -1]
        if tokens:
            leaf = self.tree.extend(active.leaf, tokens, self.tails.read(active.slot, active.leaf.end - active.base, active.tail))
            if leaf is None:
                return False
            active.leaf = leaf
        active.base = active.leaf.end
        self._attend = None
        return True

    def _sample(self) -> list[DrawnChunk]:
        if self._attend is None:
            self.running.sort(key=lambda active: (_order(_read_path(active)), active.slot))
            slots, paths = [active.slot for active in self.running], [_read_path(active) for active in self.running]
            self._attend = DecodeAttention(self.decoder.shape, self.tails, slots, paths)
        requests = [active.request for active in self.running]
        self._attend.begin([active.tail for active in self.running])
        tokens, positions = [r.tokens[-1] for r in requests], [len(r.tokens) - 1 for r in requests]
        self._choose([active.leaf.adapter for active in self.running])
        hidden = self.decoder(self._tensor([tokens]), self._tensor([positions]), self._attend)
        logits = self.decoder.logits(hidden[0])
        forbid(logits, [r.grammar for r in requests])
        drawn = sample(logits, [r.sampling for r in requests], [r.uniform() for r in requests])
        wanted = max(r.sampling.top_logprobs for r in requests)
        return self._append_all(drawn, most_likely(logits, wanted) if wanted else None)

    def _append_all(self, drawn: DrawnTokens, likely: MostLikely | None) -> list[DrawnChunk]:
        """Append each row's token to its request; remove requests that finish."""
        rows: list[list[float]] = torch.stack([part.double() for part in drawn[:3]], dim=1).tolist()  # pyright: ignore[reportUnknownVariableType]
        sampled = [self._append(active.request, *row) for active, row in zip(self.running, rows, strict=True)]
        if drawn.kept is not None:
            kept = drawn.kept.cpu().numpy()
            sampled = [
                chunk._replace(kept=(pack_set(row),)) if keeps_sets(chunk.request.sampling) else chunk
                for chunk, row in zip(sampled, kept, strict=True)
            ]
        if likely is not None:
            ranked = torch.stack([part.double() for part in likely], dim=1).cpu().numpy()  # [rows, 2, count]
            sampled = [
                chunk._replace(most_likely=likely_tokens(chunk.request.sampling, row[None]))
                for chunk, row in zip(sampled, ranked, strict=True)
            ]
        for active, token in zip(list(self.running), sampled, strict=True):
            if token.finish and token.finish != "error":
                self._fold(active)
            if token.finish:
                self._remove(active)
        return sampled

    def _append(self, request: Request, drawn_id: float, logprob: float, full_logprob: float) -> DrawnChunk:
        token_id = int(drawn_id)
        request.tokens.append(token_id)
        problem = "" if request.grammar is None else follow(request.grammar, token_id)
        end = Ending("error", problem) if problem else ending(request, full_logprob, self.decode_text)
        return DrawnChunk(request, [token_id], [logprob], [full_logprob], *end)

    def _requeue(self, active: ActiveRequest) -> None:
        """Put it at the front of the queue: slots go to the oldest requests, so all that wait are younger."""
        self._remove(active)
        self.waiting.appendleft(active.request)

    def _remove(self, active: ActiveRequest) -> None:
        self.tree.release(active.leaf)
        insort(self._free, active.slot)
        for group in (self.planned, self.running):
            if active in group:
                group.remove(active)
        self._attend = None

    def _choose(self, slots: list[int]) -> None:
        if self.adapters.policies:
            self.adapters.choose(torch.tensor(slots, device=self._device))

    def _tensor(self, values: list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)


def keeps_sets(sampling: Sampling) -> bool:
    """Whether it is recorded what each token was chosen from."""
    return sampling.truncated and sampling.temperature > 0.0


def likely_tokens(sampling: Sampling, ranked: NDArray[np.float64]) -> tuple[TokenLogprobs, ...]:
    """What a request gets of the most likely tokens of some steps: ids and log-probabilities, [steps, 2, count]."""
    count = sampling.top_logprobs
    if not count:
        return ()
    rows: list[list[list[float]]] = ranked[:, :, :count].tolist()
    return tuple(
        tuple((int(token_id), logprob) for token_id, logprob in zip(*row, strict=True) if logprob > -math.inf) for row in rows
    )


class Ending(NamedTuple):
    finish: Finish | None
    problem: str = ""


def ending(request: Request, full_logprob: float, decode: Callable[[Sequence[int]], str] | None) -> Ending:
    """Whether a request ends with its last token, and how."""
    if not math.isfinite(full_logprob):
        return Ending("error", "the logits are not finite, so the policy's weights are broken")
    try:
        if request.tokens[-1] in request.stop_ids or (request.sampling.stop and _text_ends(request, decode)):
            return Ending("stop")
    except Exception as cause:  # from the tokenizer; it must not fail the other requests of the batch
        return Ending("error", f"its text could not be searched for stop strings: {type(cause).__name__}: {cause}")
    return Ending("length" if len(request.tokens) - request.prompt_length >= request.sampling.max_tokens else None)


def follow(grammar: ReplyState, token_id: int) -> str:
    """Advance a grammar by a drawn token. Returns why the reply cannot continue; empty if it can.

    A grammar that fails while the mask is computed allows no token or any, and none here.
    """
    problem = "" if grammar.advance(token_id) else grammar.problem
    return f"the reply's grammar cannot be followed any further: {problem}" if problem else ""


def _text_ends(request: Request, decode: Callable[[Sequence[int]], str] | None) -> bool:
    """Whether the last tokens complete a stop string."""
    if decode is None:
        return False
    window = max(len(stop.encode()) for stop in request.sampling.stop) + STOP_MARGIN
    text = decode(request.tokens[max(request.prompt_length, len(request.tokens) - window) :])
    return any(stop in text for stop in request.sampling.stop)


def _read_path(active: ActiveRequest) -> list[Segment]:
    return [segment for segment in active.leaf.path() if segment.start < active.base]


def _order(path: list[Segment]) -> list[int]:
    """Sort key that puts paths with common segments next to each other: siblings differ in their first token."""
    return [path[0].adapter, *(segment.tokens[0] for segment in path)] if path else []
