"""Continuous batching on a GPU, without threads: the host plans and hands out tokens, the device decodes ahead of it.

Requests wait for a lane, are prefilled together and decoded together, as in `core.py`. Each `step` queues some decode steps on the
device and then reads those queued by the step before, so the device never waits for the host. The device ends a reply at a stop id
or at its length; the host ends it at a stop string and drops what was drawn beyond.

The context of a request is a list of rows of the cache: those of a path of the prefix tree, shared with every request that has the
same tokens, then its own. When it finishes, its rows go to the tree, and nothing is copied.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.engines.embedded import fused
from penstock.engines.embedded.core import DrawnChunk, Request, ending, follow, keeps_sets, likely_tokens
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.kv_cache import CacheRows, PrefixTree, Segment
from penstock.engines.embedded.lanes import MAX_STOPS, RING, TRUNCATED_STEPS, DrawKind, Lanes, PackedPrompts, StepResults
from penstock.engines.embedded.lora import AdapterSlots
from penstock.engines.embedded.sampling import ReplyState, fill_rows
from penstock.engines.token_sets import pack_bits

PASS_TOKENS = 8192, 32768
"""Most tokens of one prefill pass: of a large model, and of a small one."""

PASS_WEIGHTS = 1e13
"""Weights times tokens of a pass that takes some tens of milliseconds, which running replies wait for."""

STEPS_BETWEEN_PASSES = 2
"""Most decode steps between two prefill passes: the sooner all prompts are computed, the larger the batches."""

MANY_LANES = 256
"""From here on, windows have twice the steps while nothing waits for a lane: the host's work is per lane and window."""

RESERVED = 128
"""Positions for which a running request gets rows and uniform numbers at a time; with two windows ahead, less than RING."""

FIRST_LANES = 32
"""Batches up to here are captured before the first request: those of a usual training step, and what is left of them."""

NO_LANE, GONE = -1, -2


@dataclass(eq=False, slots=True)
class LaneRequest:
    """A request that has a path in the tree, and a lane once its prompt is computed."""

    request: Request
    leaf: Segment
    """End of its path; held, so that the tree keeps the path."""
    lane: int = NO_LANE
    rows: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    """Its own rows, of the positions from `leaf.end` on."""
    reserved: int = 0
    """Positions before this have rows."""
    queued: int = 0
    """Tokens that steps already queued may add."""
    limit: int = 0
    """The context's length at which the reply ends."""


class GrammarProblem(NamedTuple):
    """Why a reply cannot continue."""

    tokens: int
    """How many it has of the window, up to the one that its grammar does not allow."""
    reason: str


class GrammarSteps(NamedTuple):
    """Steps in which some requests had a grammar."""

    steps: int
    results: StepResults
    problems: dict[int, GrammarProblem]
    """By lane."""


class StepWindow(NamedTuple):
    """Decode steps that were queued together."""

    requests: list[LaneRequest]
    lanes: list[int]
    """The lanes of the requests when the steps were queued."""
    steps: int
    results: StepResults
    problems: dict[int, GrammarProblem]
    """By lane."""


class PagedCore:
    """Lanes, prefix tree and the queue of waiting requests. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        cache_tokens: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        graphs: bool | None = None,
        max_steps: int = 8,
    ) -> None:
        self.decoder, self.decode_text, self.slots, self.capacity = decoder, decode, slots, cache_tokens
        self.max_steps = max_steps
        self.pass_tokens = pass_tokens(decoder)
        self.prefilled = 0
        """Tokens that prefill passes computed, ever."""
        self.adapters = AdapterSlots(decoder)
        self.lanes = Lanes(decoder, self.adapters, lanes=slots, cache_rows=cache_tokens, max_steps=2 * max_steps, graphs=graphs)
        self.waiting: deque[Request] = deque()
        self.planned: list[LaneRequest] = []
        self.running: list[LaneRequest] = []
        self._uniforms: dict[int, list[float]] = {}
        """By request: the numbers of its reply's tokens, as far as they were drawn from its generator."""
        self._window: StepWindow | None = None
        self._forget()

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.waiting or self.planned or self.running or self._window)

    def warm_up(self) -> None:
        """Compile and capture what the first requests will need; only while nothing runs."""
        with torch.inference_mode():
            self.lanes.warm_up(FIRST_LANES)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Remove a request and free its lane. Does nothing if it has already finished."""
        if request in self.waiting:
            self.waiting.remove(request)
        for active in [*self.planned, *self.running]:
            if active.request is request:
                self._remove([active])
        self._uniforms.pop(request.key, None)

    def drain(self) -> list[DrawnChunk]:
        """Read what is queued, so that the weights may change; nothing is queued after this."""
        with torch.inference_mode():
            sampled = self._read()
        self.lanes.wait()
        return sampled

    def reset(self, policies: Collection[str] | None = None) -> None:
        """Drop all keys and values, or those of some policies; after `drain`.

        Active requests go back to the front of the queue, oldest first.
        """
        lost = [active for active in [*self.planned, *self.running] if policies is None or active.request.policy in policies]
        for active in sorted(lost, key=lambda active: -active.request.key):
            self.waiting.appendleft(active.request)
        if policies is None:
            self._forget()
            return
        self._remove(lost)
        for policy in policies:
            self.tree.drop(self.adapters.slot(policy))
        self.lanes.renew()

    def drop(self) -> list[Request]:
        """After an error, drop the active requests and all keys and values; returns those requests."""
        lost = [active.request for active in [*self.planned, *self.running]]
        for request in lost:
            self._uniforms.pop(request.key, None)
        self._window = None
        self._forget()
        return lost

    def step(self) -> list[DrawnChunk]:
        """Admit, queue a prefill pass and some decode steps; returns the tokens of those queued by the step before."""
        with torch.inference_mode(), self.lanes.queue():
            self._admit()
            self._prefill()
            early = self._reserve_all()
            self._pack()
            if self._has_grammars():  # their tokens are known when the steps are queued
                early += self._read()
                self._window = self._queue_steps()
                return early + self._read()
            window = self._queue_steps()
            sampled = self._read()
            self._window = window
            return early + sampled

    def _forget(self) -> None:
        self.planned, self.running = [], []
        self.tree = RowTree(self.capacity, self.pass_tokens)
        self._free_lanes = list(range(self.slots))
        self.lanes.clear()

    def _admit(self) -> None:
        """Plan waiting requests, but no more than two passes at a time: the device waits meanwhile."""
        before = self.tree.tokens
        while self.waiting and len(self.planned) + len(self.running) < self.slots:
            if self.planned and self.tree.tokens > before + 2 * self.pass_tokens:
                break
            leaf = self.tree.plan(self.waiting[0].tokens[:-1], self.adapters.slot(self.waiting[0].policy))
            if leaf is None:
                break  # no room until another request finishes
            self.planned.append(LaneRequest(self.waiting.popleft(), leaf))

    def _prefill(self) -> None:
        """Queue a pass over planned segments, parents first, as many as fit; requests whose path is computed get a lane."""
        chosen: list[Segment] = []
        room, full = self.pass_tokens, False
        ready: list[LaneRequest] = []
        marked: set[Segment] = set()
        for active in self.planned:
            for segment in active.leaf.path():
                if segment.ready or segment in marked:
                    continue
                if len(segment.tokens) > room:
                    full = True
                    break
                chosen.append(segment)
                marked.add(segment)
                room -= len(segment.tokens)
            else:
                ready.append(active)
            if full:
                break
        if chosen:
            self._queue_pass(chosen)
        if ready:
            self._start(ready)

    def _queue_pass(self, segments: list[Segment]) -> None:
        per_block = fused.block_tokens(self.decoder.shape.heads, self.decoder.shape.kv_heads)
        context: list[NDArray[np.int32]] = []
        blocks: list[NDArray[np.int32]] = []
        first = begin = 0
        for segment in segments:
            segment.kv = CacheRows(self.tree.take(len(segment.tokens)))
            rows = path_rows(segment)
            at = np.arange(0, len(segment.tokens), per_block, dtype=np.int32)
            counts = np.minimum(per_block, len(segment.tokens) - at)
            blocks.append(np.stack((first + at, counts, segment.start + at, np.full_like(at, begin)), 1))
            context.append(rows)
            first += len(segment.tokens)
            begin += len(rows)
        self.prefilled += first
        tokens = np.array([token for segment in segments for token in segment.tokens], dtype=np.int64)
        positions = np.concatenate([np.arange(segment.start, segment.end) for segment in segments])
        rows = np.concatenate([rows[segment.start :] for rows, segment in zip(context, segments, strict=True)])
        adapters = np.concatenate([np.full(len(segment.tokens), segment.adapter) for segment in segments])
        self.lanes.prefill(PackedPrompts(tokens, positions, rows, adapters, np.concatenate(context), np.concatenate(blocks)))

    def _start(self, ready: list[LaneRequest]) -> None:
        """Give lanes to requests; their rows so far are those of their paths."""
        at: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int32]] = []
        for active in ready:
            active.lane = self._free_lanes.pop(0)
            path = path_rows(active.leaf)
            at.append(np.arange(len(path)) + active.lane * self.lanes.width)
            rows.append(path)
            request = active.request
            active.reserved = active.leaf.end
            active.limit = request.prompt_length + request.sampling.max_tokens
            self._uniforms.setdefault(request.key, [])
        none = np.zeros(0, dtype=np.int64)
        self.lanes.fill(np.concatenate(at), np.concatenate(rows), none, none.astype(np.float64))
        requests = [active.request for active in ready]
        state = [(r.tokens[-1], len(r.tokens) - 1, active.limit) for r, active in zip(requests, ready, strict=True)]
        stops = [() if len(r.stop_ids) > MAX_STOPS else tuple(r.stop_ids) for r in requests]
        adapters = [active.leaf.adapter for active in ready]
        self.lanes.begin([active.lane for active in ready], state, [r.sampling for r in requests], stops, adapters)
        self.running += ready
        self.planned = [active for active in self.planned if active.lane < 0]

    def _reserve_all(self) -> list[DrawnChunk]:
        """Give rows and uniform numbers to requests that might run out of them in the next window.

        Where there are no rows left, the youngest requests go back to the queue.
        """
        early: list[DrawnChunk] = []
        at: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int32]] = []
        ring_at: list[NDArray[np.int64]] = []
        uniforms: list[float] = []
        for active in list(self.running):
            ahead = len(active.request.tokens) + active.queued + 2 * self.max_steps
            if active.reserved >= min(active.limit, ahead):
                continue
            count = min(RESERVED, active.limit - active.reserved)
            while active.lane >= 0 and not self.tree.reserve(count):
                if self._window is not None:
                    early += self._read()  # some may finish, and those that must go take their tokens along
                else:
                    self._requeue(max([*self.planned, *self.running], key=lambda active: active.request.key))
            if active.lane < 0:
                continue
            positions = np.arange(active.reserved, active.reserved + count)
            taken = self.tree.take(count)
            active.rows.append(taken)
            at.append(positions + active.lane * self.lanes.width)
            rows.append(taken)
            ring_at.append(positions % RING + active.lane * RING)
            uniforms += self._numbers(active.request, active.reserved, count)
            active.reserved += count
        if at:
            self.lanes.fill(np.concatenate(at), np.concatenate(rows), np.concatenate(ring_at), np.array(uniforms))
        return early

    def _numbers(self, request: Request, position: int, count: int) -> list[float]:
        """The uniform numbers of the tokens at these positions; 0 for those of the prompt."""
        drawn = self._uniforms[request.key]
        first, uniform = position - request.prompt_length, request.uniform
        drawn += [uniform() for _ in range(first + count - len(drawn))]
        return [0.0] * max(0, -first) + drawn[max(0, first) : first + count]

    def _pack(self) -> None:
        """Move requests to lower lanes where that allows a smaller batch."""
        count = len(self.running)
        if not count or bucket(max(active.lane for active in self.running) + 1) == bucket(count):
            return
        high = [active for active in self.running if active.lane >= count]
        low = [lane for lane in self._free_lanes if lane < count]
        self.lanes.move([active.lane for active in high], low)
        for active, lane in zip(high, low, strict=True):
            self._free_lanes.remove(lane)
            insort(self._free_lanes, active.lane)
            active.lane = lane

    def _queue_steps(self) -> StepWindow | None:
        if not self.running:
            return None
        numbers = [active.lane for active in self.running]
        lanes = min(self.slots, bucket(max(numbers) + 1))
        most = self.max_steps if self.waiting or lanes < MANY_LANES else 2 * self.max_steps
        most = min(most, STEPS_BETWEEN_PASSES) if self.planned else most
        kind = self._kind()
        most = min(most, TRUNCATED_STEPS) if kind.truncated else most
        steps = min(most, max([active.limit - len(active.request.tokens) - active.queued for active in self.running]))
        if steps <= 0:
            return None  # the steps on their way end all replies
        if self._has_grammars():
            steps, results, problems = self._steps_by_grammar(lanes, steps, kind)
        else:
            results, problems = self.lanes.run(lanes, steps, kind), {}
        for active in self.running:
            active.queued += steps
        return StepWindow(list(self.running), numbers, steps, results, problems)

    def _has_grammars(self) -> bool:
        return any(active.request.grammar is not None for active in self.running)

    def _steps_by_grammar(self, lanes: int, steps: int, kind: DrawKind) -> GrammarSteps:
        """Run steps in which some requests have a grammar: what they may draw depends on the token before, which the host must see.

        It asks the grammars while the device runs the layers, which need the token alone; those of the next step are queued before
        the host waits for this one's tokens. All else is done once for all steps: there is little time while the device computes
        one, and the interpreter is shared with those who wait for tokens.
        """
        allowed = self.lanes.allowed[:lanes]
        allowed.fill(-1)
        bound = [(active.lane, active.request, state) for active in self.running if (state := active.request.grammar) is not None]
        problems: dict[int, GrammarProblem] = {}
        done = 0
        while True:
            self.lanes.forward(lanes)
            fill_rows(allowed, [(lane, state) for lane, _, state in bound])
            results = self.lanes.draw(lanes, done, kind)
            self.lanes.forward(lanes)
            drawn: list[float] = results.read()[:, done, 0].tolist()
            done += 1
            going: list[tuple[int, Request, ReplyState]] = []
            for lane, request, state in bound:
                token_id = int(drawn[lane])
                if token_id < 0:  # the device has ended it
                    continue
                if problem := follow(state, token_id):
                    problems[lane] = GrammarProblem(done, problem)
                elif token_id not in request.stop_ids:
                    going.append((lane, request, state))
            bound = going
            if done == steps or max(drawn) < 0:
                return GrammarSteps(done, results, problems)

    def _kind(self) -> DrawKind:
        samplings = [active.request.sampling for active in self.running]
        return DrawKind(any(each.truncated for each in samplings), any(each.top_logprobs for each in samplings))

    def _read(self) -> list[DrawnChunk]:
        """Hand out the tokens of the queued window."""
        window, self._window = self._window, None
        if window is None:
            return []
        values = window.results.read()
        ids = values[:, :, 0].astype(np.int64)
        counts = (ids >= 0).sum(1).tolist()
        finite: list[bool] = np.isfinite(values[:, :, 2]).all(1).tolist()  # pyright: ignore[reportAssignmentType]
        columns = ids.tolist(), values[:, :, 1].tolist(), values[:, :, 2].tolist()
        sampled: list[DrawnChunk] = []
        ended: list[LaneRequest] = []
        for active, lane in zip(window.requests, window.lanes, strict=True):
            if active.lane == GONE:
                continue
            active.queued -= window.steps
            if not (count := counts[lane]):
                continue
            drawn, logprobs, full_logprobs = [column[lane] for column in columns]
            request, problem = active.request, window.problems.get(lane)
            if count == window.steps and finite[lane] and problem is None and self._goes_on(active, drawn):  # most chunks
                request.tokens += drawn
                chunk = DrawnChunk(request, drawn, logprobs, full_logprobs)
                sampled.append(self._with_sets(chunk, window.results, lane))
                continue
            count = count if problem is None else problem.tokens
            chunk = self._append(request, drawn[:count], logprobs[:count], full_logprobs[:count])
            if problem is not None and len(chunk.ids) == count:
                chunk = chunk._replace(finish="error", problem=problem.reason)
            sampled.append(self._with_sets(chunk, window.results, lane))
            if chunk.finish:
                ended.append(active)
                self._uniforms.pop(active.request.key, None)
                if chunk.finish != "error":
                    self._keep(active)
        self._remove(ended)
        return sampled

    def _with_sets(self, chunk: DrawnChunk, results: StepResults, lane: int) -> DrawnChunk:
        """Add what each token was chosen from and the most likely ones, of a window that was read."""
        sampling, count = chunk.request.sampling, len(chunk.ids)
        if results.kept is not None and keeps_sets(sampling):
            bits, vocab = results.kept[lane, :count].numpy(), self.decoder.shape.vocab_size
            chunk = chunk._replace(kept=tuple(pack_bits(row, vocab) for row in bits))
        if results.likely is not None and sampling.top_logprobs:
            chunk = chunk._replace(most_likely=likely_tokens(sampling, results.likely[lane, :count].numpy()))
        return chunk

    def _goes_on(self, active: LaneRequest, ids: list[int]) -> bool:
        """Whether it is certain that none of the last tokens ends the reply."""
        request = active.request
        by_device = not request.sampling.stop and len(request.stop_ids) <= MAX_STOPS
        return by_device and len(request.tokens) + len(ids) < active.limit and ids[-1] not in request.stop_ids

    def _append(self, request: Request, ids: list[int], logprobs: list[float], full_logprobs: list[float]) -> DrawnChunk:
        """Append tokens to a request, up to the one that ends it."""
        if request.sampling.stop or len(request.stop_ids) > MAX_STOPS:
            for count in range(1, len(ids) + 1):
                request.tokens.append(ids[count - 1])
                end = ending(request, full_logprobs[count - 1], self.decode_text)
                if end.finish:
                    return DrawnChunk(request, ids[:count], logprobs[:count], full_logprobs[:count], *end)
            return DrawnChunk(request, ids, logprobs, full_logprobs)
        request.tokens += ids
        return DrawnChunk(request, ids, logprobs, full_logprobs, *ending(request, full_logprobs[-1], self.decode_text))

    def _keep(self, active: LaneRequest) -> None:
        """Move a finished request's rows to the tree."""
        tokens = active.request.tokens[active.leaf.end : -1]
        rows = np.concatenate(active.rows)
        active.rows = []
        active.leaf = self.tree.adopt(active.leaf, tokens, rows)

    def _requeue(self, active: LaneRequest) -> None:
        """Put it at the front of the queue: lanes go to the oldest requests, so all that wait are younger."""
        self._remove([active])
        self.waiting.appendleft(active.request)

    def _remove(self, gone: Sequence[LaneRequest]) -> None:
        """Free rows and lanes."""
        alive = [active.lane for active in gone if active.lane >= 0 and not self._ended_by_device(active)]
        if alive:
            self.lanes.end(alive)
        for active in gone:
            if active.rows:
                self.tree.give_back(np.concatenate(active.rows))
            self.tree.release(active.leaf)
            if active.lane >= 0:
                insort(self._free_lanes, active.lane)
            active.lane = GONE
        if gone:
            self.planned = [active for active in self.planned if active.lane != GONE]
            self.running = [active for active in self.running if active.lane != GONE]

    def _ended_by_device(self, active: LaneRequest) -> bool:
        request = active.request
        stopped = len(request.tokens) > request.prompt_length and request.tokens[-1] in request.stop_ids
        return len(request.tokens) >= active.limit or (stopped and len(request.stop_ids) <= MAX_STOPS)


class RowTree(PrefixTree):
    """A prefix tree over rows of the cache; requests take their rows from what it leaves."""

    def __init__(self, rows: int, longest: int) -> None:
        self._free = np.arange(rows, 0, -1, dtype=np.int32)  # row 0 is nobody's
        self._left = rows
        super().__init__(capacity=rows, longest=longest)

    def reserve(self, count: int) -> bool:
        """Keep `count` rows free for a request, which takes them next; False without room."""
        if not self.make_room(count):
            return False
        self.capacity -= count
        return True

    def take(self, count: int) -> NDArray[np.int32]:
        self._left -= count
        assert self._left >= 0
        return self._free[self._left : self._left + count][::-1].copy()

    def give_back(self, rows: NDArray[np.int32]) -> None:
        """Return rows that a request had reserved."""
        self.capacity += len(rows)
        self._put(rows)

    def adopt(self, held: Segment, tokens: Sequence[int], rows: NDArray[np.int32]) -> Segment:
        """Make a request's own rows part of the tree and move its hold to the end of `tokens`; other rows are freed."""
        self.capacity += len(rows)
        before = self.tokens
        last = self.extend(held, tokens, CacheRows(rows)) if tokens else held
        assert last is not None  # its own rows are room enough
        unused = [rows[len(tokens) :]]
        if self.tokens - before < len(tokens):  # another request stored some of the same tokens
            unused.append(np.setdiff1d(rows[: len(tokens)], path_rows(last)[held.end :]))
        self._put(np.concatenate(unused))
        return last

    def _put(self, rows: NDArray[np.int32]) -> None:
        self._free[self._left : self._left + len(rows)] = rows
        self._left += len(rows)

    def _remove(self, segment: Segment) -> Segment:
        if isinstance(segment.kv, CacheRows):
            self._put(segment.kv.rows)
        return super()._remove(segment)


def pass_tokens(decoder: Decoder) -> int:
    """Most tokens of one prefill pass: many for a small model, whose passes would otherwise be bound by their launches."""
    weights = sum(parameter.numel() for parameter in decoder.parameters())
    least, most = PASS_TOKENS
    return min(most, max(least, bucket(int(PASS_WEIGHTS / weights)) // 2))


def free_tokens(decoder: Decoder, slots: int) -> int:
    """Tokens that a third of the GPU's free memory holds, in addition to what training takes; at most what all slots can use."""
    shape, weight = decoder.shape, decoder.embed.weight
    free, _ = torch.cuda.mem_get_info(weight.device)
    training = 16 * sum(parameter.numel() for parameter in decoder.parameters())  # float32: master, gradient, two moments
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * weight.element_size()
    return max(4096, min(slots * shape.context_length, (free - training) // 3 // row))


def path_rows(leaf: Segment) -> NDArray[np.int32]:
    """The rows of all tokens from the root to the end of `leaf`."""
    parts = [segment.kv.rows for segment in leaf.path() if isinstance(segment.kv, CacheRows)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def bucket(lanes: int) -> int:
    """The batch size that is captured for so many lanes: a power of two."""
    return 1 << (lanes - 1).bit_length()
