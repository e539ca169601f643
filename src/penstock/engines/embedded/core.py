"""The engine's inner loop, without threads: requests wait, get a seat, are prefilled together and decoded together.

Each `step` admits who fits, computes at most one prefill pass, and samples one token for every request whose prompt is known, so
that a long prompt never stops those already talking. A request's context is a path of the prefix tree, shared with whoever has
the same tokens, plus a tail of its own. A finished request leaves its tail to the tree: the next turn of its conversation finds it.

Nothing here is lost when memory runs short or the weights change: a request goes back to the front of the queue with the tokens
that it has, and is prefilled anew.
"""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.engines.embedded.attention import DecodeAttention, PrefillAttention
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.kv_cache import PrefixTree, Segment, TailCache
from penstock.engines.embedded.sampling import DrawnTokens, sample
from penstock.errors import ConfigError
from penstock.records import Finish, Sampling

MAX_ABSORBED = 384
"""Tokens at the end of a path that a request copies to its tail, as tails are read all at once and segments one by one.

What several requests read counts that often: reading a segment once for all of them is better than many copies of it.
"""

MAX_TAIL = 512
"""A tail of this many tokens moves to the tree: tails are read at the width of the longest."""

MIN_TAIL = 8

UNEVEN_TAIL = 64
"""So does one of this many when the others are so short that most of what is read would be padding."""

STOP_MARGIN = 16
"""Tokens searched for a stop string beyond its length in bytes: some tokens, such as special ones, have no text."""


@dataclass(eq=False, slots=True)
class Request:
    """What is asked for, and what came of it so far."""

    key: int
    """Requests are served in this order."""
    tokens: list[int]
    """Prompt and reply so far; the last one has not been through the model yet."""
    prompt_length: int
    sampling: Sampling
    stop_ids: frozenset[int]
    uniform: Callable[[], float]
    """The request's own random numbers in [0, 1)."""


class DrawnToken(NamedTuple):
    request: Request
    id: int
    logprob: float
    full_logprob: float
    finish: Finish | None
    problem: str = ""
    """Why the request cannot go on; with finish "error" only."""


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request with a slot and a path in the tree."""

    request: Request
    slot: int
    leaf: Segment
    """End of its path, held."""
    base: int = 0
    """Positions before this are read from the path, those from it on are in the tail."""

    @property
    def tail(self) -> int:
        """How many tokens its tail holds: all that went through the model, from `base` on."""
        return len(self.request.tokens) - 1 - self.base


def _longest_tail(slots: int, cache_tokens: int) -> int:
    """A power of two, so that all tails together take at most a quarter of the cache; ConfigError where that is too little."""
    share = cache_tokens // (4 * slots)
    if share < MIN_TAIL:
        least = 4 * slots * MIN_TAIL
        raise ConfigError(f"engine.cache_tokens = {cache_tokens} is too little for {slots} slots; set it to {least} or more")
    return min(MAX_TAIL, 1 << (share.bit_length() - 1))


class EngineCore:
    """Slots, tree, tails and the queue in front of them. Not thread-safe: one thread owns it."""

    def __init__(
        self, decoder: Decoder, *, slots: int, cache_tokens: int, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        weight = decoder.embed.weight
        self.decoder, self.decode_text = decoder, decode
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
        """None after every change of rows or of what they read."""

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.waiting or self.planned or self.running)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request; its slot is free at once. Nothing happens if it has already finished."""
        if request in self.waiting:
            self.waiting.remove(request)
        for seat in [*self.planned, *self.running]:
            if seat.request is request:
                self._leave(seat)

    def reset(self) -> None:
        """Forget every key and value; whoever had a seat is served again from the front of the queue, tokens kept."""
        for seat in sorted([*self.planned, *self.running], key=lambda seat: -seat.request.key):
            self._requeue(seat)
        self.tree.clear()
        self.tails.clear()

    def drop(self) -> list[Request]:
        """After an error, start afresh without those who had a seat; returns them."""
        lost = [seat.request for seat in [*self.planned, *self.running]]
        self.planned, self.running, self._attend = [], [], None
        self._free = list(range(self.slots))
        self.tree.clear()
        self.tails.clear()
        return lost

    def step(self) -> list[DrawnToken]:
        """Admit, prefill one pass, sample one token for each running request."""
        with torch.inference_mode():
            self._admit()
            self._prefill()
            self._fold_tails()
            return self._sample() if self.running else []

    def _admit(self) -> None:
        while self.waiting and self._free:
            leaf = self.tree.plan(self.waiting[0].tokens[:-1])
            if leaf is None:
                return  # somebody must finish first
            self.planned.append(ActiveRequest(self.waiting.popleft(), self._free.pop(0), leaf))

    def _prefill(self) -> None:
        segments = self._next_segments()
        if segments:
            tokens = [token for segment in segments for token in segment.tokens]
            positions = [position for segment in segments for position in range(segment.start, segment.end)]
            attend = PrefillAttention(self.decoder.shape, segments, device=self._device, dtype=self._dtype)
            self.decoder(self._tensor([tokens]), self._tensor([positions]), attend)
            attend.commit()
        ready = [seat for seat in self.planned if all(segment.ready for segment in seat.leaf.path())]
        if ready:
            readers = Counter(segment for seat in [*self.planned, *self.running] for segment in seat.leaf.path())
            for seat in ready:
                self._absorb(seat, readers)
            self.planned = [seat for seat in self.planned if seat not in ready]
            self.running += ready
            self._attend = None

    def _next_segments(self) -> list[Segment]:
        """Planned segments whose ancestors are known, in the order of their requests, as many as one pass takes."""
        chosen: dict[Segment, None] = {}
        room = self.pass_tokens
        for seat in self.planned:
            segment = next((segment for segment in seat.leaf.path() if not segment.ready), None)
            if segment is None or segment in chosen:
                continue
            if len(segment.tokens) > room:
                break
            chosen[segment] = None
            room -= len(segment.tokens)
        return sorted(chosen, key=lambda segment: _order(segment.path()))

    def _absorb(self, seat: ActiveRequest, readers: "Counter[Segment]") -> None:
        most = min(MAX_ABSORBED, 3 * self._longest_tail // 4)
        seat.base = seat.leaf.end
        for segment in reversed(seat.leaf.path()):
            if len(segment.tokens) * readers[segment] > most or seat.leaf.end - segment.start > most:
                break
            seat.base = segment.start
        for segment in seat.leaf.path():
            if segment.start >= seat.base and segment.cached is not None:
                self.tails.load(seat.slot, segment.start - seat.base, segment.cached)

    def _fold_tails(self) -> None:
        """Move to the tree the tails that are full, and those that make the others' padding too wide."""
        total = sum(seat.tail for seat in self.running)
        for seat in sorted(self.running, key=lambda seat: -seat.tail):
            full = seat.tail >= self._longest_tail
            if not full and (seat.tail < UNEVEN_TAIL or seat.tail * len(self.running) <= 2 * total):
                return
            while seat in self.running and not self._fold(seat) and full:
                self._requeue(max([*self.planned, *self.running], key=lambda seat: seat.request.key))
            total = sum(seat.tail for seat in self.running)

    def _fold(self, seat: ActiveRequest) -> bool:
        """Keep the tail in the tree and begin a new one; False where the tree has no room."""
        tokens = seat.request.tokens[seat.leaf.end : -1]
        if tokens:
            leaf = self.tree.extend(seat.leaf, tokens, self.tails.read(seat.slot, seat.leaf.end - seat.base, seat.tail))
            if leaf is None:
                return False
            seat.leaf = leaf
        seat.base = seat.leaf.end
        self._attend = None
        return True

    def _sample(self) -> list[DrawnToken]:
        if self._attend is None:
            self.running.sort(key=lambda seat: (_order(_read_path(seat)), seat.slot))
            slots, paths = [seat.slot for seat in self.running], [_read_path(seat) for seat in self.running]
            self._attend = DecodeAttention(self.decoder.shape, self.tails, slots, paths)
        requests = [seat.request for seat in self.running]
        self._attend.begin([seat.tail for seat in self.running])
        tokens, positions = [r.tokens[-1] for r in requests], [len(r.tokens) - 1 for r in requests]
        hidden = self.decoder(self._tensor([tokens]), self._tensor([positions]), self._attend)
        draw = sample(self.decoder.logits(hidden[0]), [r.sampling for r in requests], [r.uniform() for r in requests])
        return self._take(draw)

    def _take(self, draw: DrawnTokens) -> list[DrawnToken]:
        """Append each row's token to its request; those that finish leave."""
        rows: list[list[float]] = torch.stack([part.double() for part in draw], dim=1).tolist()  # pyright: ignore[reportUnknownVariableType]
        sampled = [self._judge(seat.request, *row) for seat, row in zip(self.running, rows, strict=True)]
        for seat, token in zip(list(self.running), sampled, strict=True):
            if token.finish and token.finish != "error":
                self._fold(seat)
            if token.finish:
                self._leave(seat)
        return sampled

    def _judge(self, request: Request, drawn: float, logprob: float, full_logprob: float) -> DrawnToken:
        """Append a token and see whether it is the last."""
        token = int(drawn)
        request.tokens.append(token)
        if not math.isfinite(full_logprob):
            return DrawnToken(request, token, 0.0, 0.0, "error", "the logits are not finite, so the policy's weights are broken")
        finish, problem = None, ""
        try:
            if token in request.stop_ids or self._says_stop(request):
                finish = "stop"
            elif len(request.tokens) - request.prompt_length >= request.sampling.max_tokens:
                finish = "length"
        except Exception as cause:  # the tokenizer's; it must not fail the others
            finish, problem = "error", f"its text could not be searched for stop strings: {type(cause).__name__}: {cause}"
        return DrawnToken(request, token, logprob, full_logprob, finish, problem)

    def _says_stop(self, request: Request) -> bool:
        """Whether the last tokens complete one of the request's stop strings."""
        if not request.sampling.stop or self.decode_text is None:
            return False
        window = max(len(stop.encode()) for stop in request.sampling.stop) + STOP_MARGIN
        text = self.decode_text(request.tokens[max(request.prompt_length, len(request.tokens) - window) :])
        return any(stop in text for stop in request.sampling.stop)

    def _requeue(self, seat: ActiveRequest) -> None:
        """Back to the front of the queue. Seats go to the oldest, so whoever waits is younger."""
        self._leave(seat)
        self.waiting.appendleft(seat.request)

    def _leave(self, seat: ActiveRequest) -> None:
        self.tree.release(seat.leaf)
        insort(self._free, seat.slot)
        for seats in (self.planned, self.running):
            if seat in seats:
                seats.remove(seat)
        self._attend = None

    def _tensor(self, values: list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)


def _read_path(seat: ActiveRequest) -> list[Segment]:
    return [segment for segment in seat.leaf.path() if segment.start < seat.base]


def _order(path: list[Segment]) -> list[int]:
    """Sorts paths so that those which share segments are neighbours: siblings differ in their first token."""
    return [segment.tokens[0] for segment in path]
