"""Decode steps on the device: a lane per running request, whose state never leaves the device between steps.

A step embeds each lane's token, runs the layers over the paged cache, draws the next token and decides whether the reply ends
with it. Steps are captured as CUDA graphs, one per batch size, and replayed without a look at their results; the host reads the
tokens of several steps in one copy. Weights are used where they are: changing them in place needs no new capture.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.engines.embedded import fused
from penstock.engines.embedded.decoder import Decoder, DecoderLayer
from penstock.engines.embedded.fused import KeyValueRows, PrefillBlocks
from penstock.engines.embedded.kv_cache import NO_ADAPTER
from penstock.engines.embedded.lora import AdapterSlots
from penstock.engines.embedded.sampling import most_likely
from penstock.records import MAX_TOP_LOGPROBS, Sampling

MAX_STOPS = 8
"""Stop ids that the device compares with; a request with more is stopped by the host."""

RING = 512
"""Uniform numbers kept per lane, by position."""

WARM_UP = 2

PREFILL_SIZES = 64, 256, 1024
"""Tokens of the prefill passes that are captured; a pass is padded to the next of them. On a larger one the device works longer
than the host needs to launch it."""

TRUNCATED_STEPS = 4
"""Most steps of a window with truncated sampling: each takes a bit per lane and token of the vocabulary."""

CONTEXT_ROWS = 1 << 19
"""Rows of all contexts of a captured pass together."""


class DrawKind(NamedTuple):
    """How the tokens of a step are drawn; each kind is captured on its own."""

    truncated: bool = False
    """Whether some lane has top-k, top-p or min-p."""
    likely: bool = False
    """Whether some lane asks for the most likely tokens."""


@dataclass(eq=False, slots=True)
class StepResults:
    """Tokens of some steps, on their way to the host."""

    values: Tensor
    """[lanes, steps, 3]: id (-1 where the lane was idle), log-probability, full log-probability."""
    done: torch.cuda.Event | None
    kept: Tensor | None = None
    """[lanes, steps, bytes]: a bit for each token that could be drawn; None without truncated sampling."""
    likely: Tensor | None = None
    """[lanes, steps, 2, MAX_TOP_LOGPROBS]: ids and log-probabilities of the most likely tokens; None if no lane asks."""

    def read(self) -> NDArray[np.float64]:
        """Wait for them."""
        if self.done is not None:
            self.done.synchronize()
        return self.values.numpy()


class PackedPrompts(NamedTuple):
    """Tokens of one prefill pass."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int32]
    adapters: NDArray[np.int64]
    """Slots in `AdapterSlots`."""
    context: NDArray[np.int32]
    """See `PrefillBlocks`."""
    blocks: NDArray[np.int32]


class PrefillInput(NamedTuple):
    """The same on the device."""

    ids: Tensor
    """[3, tokens]: ids, positions, slots of adapters."""
    rows: Tensor
    packed: PrefillBlocks


class Lanes:
    """The device's side of the engine: cache, state of every lane, captured steps. All work is queued on one stream."""

    def __init__(
        self,
        decoder: Decoder,
        adapters: AdapterSlots,
        *,
        lanes: int,
        cache_rows: int,
        max_steps: int,
        graphs: bool | None = None,
    ) -> None:
        self.decoder, self.adapters, self.count, self.max_steps = decoder, adapters, lanes, max_steps
        weight, shape = decoder.embed.weight, decoder.shape
        self.device = device = weight.device
        cuda = device.type == "cuda"
        self.graphs_enabled = cuda if graphs is None else graphs
        self._stream = torch.cuda.Stream(device) if cuda else None
        size = (shape.layers, cache_rows + 1, shape.kv_heads, shape.head_dim)
        self.cache = KeyValueRows(
            torch.zeros(size, device=device, dtype=weight.dtype), torch.zeros(size, device=device, dtype=weight.dtype)
        )
        self.width = min(shape.context_length, cache_rows)
        self._state = torch.zeros(4, lanes, dtype=torch.long, device=device)  # token, position, limit, alive
        self._params = torch.zeros(lanes, 4, device=device)  # temperature, top-k, top-p, min-p
        self._slots = torch.full((lanes,), NO_ADAPTER, dtype=torch.long, device=device)
        self._stops = torch.full((lanes, MAX_STOPS), -1, dtype=torch.long, device=device)
        self._table = torch.zeros(lanes, self.width, dtype=torch.int32, device=device)
        self._ring = torch.zeros(lanes, RING, dtype=torch.float64, device=device)
        self._rows = torch.zeros(lanes, dtype=torch.int32, device=device)
        self._lengths = torch.ones(lanes, dtype=torch.int32, device=device)
        self._uniforms = torch.zeros(lanes, dtype=torch.float64, device=device)
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        self._out = torch.zeros(lanes, max_steps, 3, dtype=torch.float64, device=device)
        self._kept: Tensor | None = None
        """[lanes, steps, bytes]: a bit for each token that truncated sampling leaves; made when it is first needed."""
        count = min(MAX_TOP_LOGPROBS, shape.vocab_size)
        self._likely = torch.zeros(lanes, max_steps, 2, count, dtype=torch.float64, device=device)
        self._bit_values = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        self.captured: dict[tuple[int, DrawKind], torch.cuda.CUDAGraph] = {}
        """Steps, by the number of lanes and how they draw."""
        self.captured_passes: dict[int, torch.cuda.CUDAGraph] = {}
        """Prefill passes, by their size."""
        most = PREFILL_SIZES[-1]
        self._prompts = PrefillInput(
            torch.zeros(3, most, dtype=torch.long, device=device),
            torch.zeros(most, dtype=torch.int32, device=device),
            PrefillBlocks(
                torch.zeros(CONTEXT_ROWS if self.graphs_enabled else 0, dtype=torch.int32, device=device),
                torch.zeros(most, 4, dtype=torch.int32, device=device),
            ),
        )
        self.captured_parts: dict[tuple[int, DrawKind | None], torch.cuda.CUDAGraph] = {}
        """Halves of steps: the layers by the number of lanes and None, the draw by that and its kind."""
        self._hidden = torch.zeros(lanes, shape.hidden, dtype=weight.dtype, device=device)
        words = (shape.vocab_size + 31) // 32
        self._allowed = torch.full((lanes, words), -1, dtype=torch.int32, device=device)  # a bit for each token
        self._allowed_host = torch.full((lanes, words), -1, dtype=torch.int32, pin_memory=cuda)
        self._drawn_host = torch.zeros(self._out.shape, dtype=self._out.dtype, pin_memory=cuda)
        self._forwarded = 0
        """Lanes whose layers were run for the next draw; 0 if that is to be done again."""
        self._pool: Any = None
        self._storage = self._addresses()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, lanes: int, steps: int, kind: DrawKind) -> StepResults:
        """Queue `steps` steps of the first `lanes` lanes."""
        with self.queue():
            self._cursor.zero_()
            kept = self._kept_bits(lanes, steps) if kind.truncated else None
            if self.graphs_enabled:
                graph = self.captured.get((lanes, kind)) or self._capture(lanes, kind)
                for _ in range(steps):
                    graph.replay()
            else:
                for _ in range(steps):
                    self._step(lanes, kind)
            return self._fetch(lanes, steps, kept, likely=kind.likely)

    def forward(self, lanes: int) -> None:
        """Queue the first half of a step, all but the draw, unless that was done. The host may work on `draw` meanwhile."""
        if self._forwarded == lanes:
            return
        with self.queue():
            self._replay(lanes, None, lambda: self._hidden[:lanes].copy_(self._states(lanes)))
        self._forwarded = lanes

    @property
    def allowed(self) -> NDArray[np.int32]:
        """[lanes, words], with a bit for each token that `draw` may draw; not to be changed before that is read."""
        return self._allowed_host.numpy()

    def draw(self, lanes: int, step: int, kind: DrawKind) -> StepResults:
        """Queue the other half of a window's step; returns the results of its steps so far, to be read before the next draw."""
        with self.queue():
            if step == 0:
                self._cursor.zero_()
            kept = self._kept_bits(lanes, step + 1) if kind.truncated else None
            self._replay(lanes, kind, lambda: self._draw_allowed(lanes, kind))
            self._forwarded = 0
            others = self._copies(kept, self._likely[:lanes, : step + 1] if kind.likely else None)
            return StepResults(self._drawn_host[:lanes, : step + 1], self._record(), *others)

    def _draw_allowed(self, lanes: int, kind: DrawKind) -> None:
        """With the copies from and to the host, so that all is one launch: the host has no time for more."""
        self._allowed[:lanes].copy_(self._allowed_host[:lanes], non_blocking=True)
        self._draw(self._hidden[:lanes], lanes, kind, masked=True)
        self._drawn_host[:lanes].copy_(self._out[:lanes], non_blocking=True)

    def _kept_bits(self, lanes: int, steps: int) -> Tensor:
        if self._kept is None:
            size = (self.count, TRUNCATED_STEPS, -(-self.decoder.shape.vocab_size // 8))
            self._kept = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._kept[:lanes, :steps]

    def _replay(self, lanes: int, kind: DrawKind | None, work: Callable[[], object]) -> None:
        if not self.graphs_enabled:
            work()
            return
        graph = self.captured_parts.get((lanes, kind))
        if graph is None:
            with self._idle():
                self.captured_parts[lanes, kind] = graph = self._capture_work(work)
        graph.replay()

    def prefill(self, prompts: PackedPrompts) -> None:
        """Queue a pass that computes keys and values."""
        tokens = np.stack((prompts.ids, prompts.positions, prompts.adapters))
        with self.queue():
            parts = [self._upload(part) for part in (tokens, prompts.rows, prompts.context, prompts.blocks)]
            size = next((size for size in PREFILL_SIZES if size >= len(prompts.ids)), None)
            if not self.graphs_enabled or size is None or len(prompts.context) > CONTEXT_ROWS:
                self._prefill(PrefillInput(parts[0], parts[1], PrefillBlocks(parts[2], parts[3])))
                return
            graph = self.captured_passes.get(size) or self._capture_pass(size)
            ids, rows, (context, blocks) = self._prompts
            for kept, part in zip((ids.t(), rows, context, blocks), (parts[0].t(), *parts[1:]), strict=True):
                kept[: len(part)].copy_(part)
            # Tokens of the padding go to row 0, and blocks of it hold none.
            rows[len(prompts.rows) : size].zero_()
            blocks[len(prompts.blocks) : size].zero_()
            graph.replay()

    def _prefill(self, prompts: PrefillInput) -> None:
        def attend(layer: int, q: Tensor) -> Tensor:
            return fused.prefill_attention(q, self.cache.keys[layer], self.cache.values[layer], prompts.packed)

        if self.adapters.policies:
            self.adapters.choose(prompts.ids[2])
        self._forward(prompts.ids[0], prompts.ids[1], prompts.rows, attend, hidden=False)

    def warm_up(self, lanes: int) -> None:
        """Capture prefill passes, and steps of up to so many lanes; all kernels are compiled on the way."""
        if not self.graphs_enabled:
            return
        with self.queue():
            for size in PREFILL_SIZES:
                self._capture_pass(size)
            for power in range(min(lanes, self.count).bit_length()):
                self._capture(1 << power, DrawKind())

    def begin(
        self,
        lanes: Sequence[int],
        state: Sequence[tuple[int, int, int]],
        samplings: Sequence[Sampling],
        stops: Sequence[Sequence[int]],
        adapters: Sequence[int],
    ) -> None:
        """Start lanes: token, position and limit of each; the reply ends when the context has `limit` tokens."""
        self._forwarded = 0
        params = np.array([(s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings], dtype=np.float32)
        padded = np.array([[*ids, *[-1] * (MAX_STOPS - len(ids))] for ids in stops], dtype=np.int64)
        with self.queue():
            index = self._upload(np.array(lanes, dtype=np.int64))
            self._state.index_copy_(1, index, self._upload(np.array([(*s, 1) for s in state], dtype=np.int64)).t())
            self._params.index_copy_(0, index, self._upload(params))
            self._stops.index_copy_(0, index, self._upload(padded))
            self._slots.index_copy_(0, index, self._upload(np.array(adapters, dtype=np.int64)))

    def fill(
        self, at: NDArray[np.int64], rows: NDArray[np.int32], ring_at: NDArray[np.int64], uniforms: NDArray[np.float64]
    ) -> None:
        """Write rows and uniform numbers; `at` and `ring_at` count through all lanes."""
        with self.queue():
            self._table.view(-1).index_copy_(0, self._upload(at), self._upload(rows))
            self._ring.view(-1).index_copy_(0, self._upload(ring_at), self._upload(uniforms))

    def end(self, lanes: Sequence[int]) -> None:
        """Stop lanes whose requests are gone; the device may have stopped them already."""
        with self.queue():
            self._state[3].index_fill_(0, self._upload(np.array(lanes, dtype=np.int64)), 0)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        self._forwarded = 0
        with self.queue():
            old, new = (self._upload(np.array(lanes, dtype=np.int64)) for lanes in (source, target))
            self._state.index_copy_(1, new, self._state[:, old])
            for part in (self._params, self._stops, self._slots, self._table, self._ring):
                part.index_copy_(0, new, part[old])
            self._state[3].index_fill_(0, old, 0)

    def clear(self) -> None:
        """Stop all lanes, and `renew`."""
        self.renew()
        with self.queue():
            self._state.zero_()

    def renew(self) -> None:
        """From here on, use weights as they were changed elsewhere, moved ones too."""
        self._forwarded = 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if (storage := self._addresses()) != self._storage:
            self.captured, self.captured_passes, self.captured_parts, self._storage = {}, {}, {}, storage
            self._pool = None  # torch refuses to capture into a pool of memory whose graphs are all gone

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _step(self, lanes: int, kind: DrawKind) -> None:
        self._draw(self._states(lanes), lanes, kind)

    def _states(self, lanes: int) -> Tensor:
        """The hidden states that the next tokens are drawn from, [lanes, hidden]. Done twice, it changes nothing."""
        rows, lengths, uniforms = self._rows[:lanes], self._lengths[:lanes], self._uniforms[:lanes]
        fused.locate(self._state, self._table, self._ring, rows, lengths, uniforms)
        ids, positions = self._state[0, :lanes], self._state[1, :lanes]

        def attend(layer: int, q: Tensor) -> Tensor:
            return fused.decode_attention(q, self.cache.keys[layer], self.cache.values[layer], self._table, lengths)

        if self.adapters.policies:
            self.adapters.choose(self._slots[:lanes])
        return self._forward(ids, positions, rows, attend, hidden=True)

    def _draw(self, hidden: Tensor, lanes: int, kind: DrawKind, *, masked: bool = False) -> None:
        head = self.decoder.embed.weight if self.decoder.head is None else self.decoder.head.weight
        logits = F.linear(hidden, head)
        if masked:
            fused.forbid(logits, self._allowed[:lanes])
        drawn = fused.draw(logits, self._params[:lanes], self._uniforms[:lanes], truncated=kind.truncated)
        if kind.likely:
            ranked = torch.stack([part.double() for part in most_likely(logits.float(), MAX_TOP_LOGPROBS)], 1)
            self._likely[:lanes].index_copy_(1, self._cursor, ranked[:, None])
        fused.advance(self._state, self._stops, drawn, self._cursor, self._out)
        if drawn.kept is not None and self._kept is not None:
            bits = F.pad(drawn.kept.to(torch.uint8), (0, -drawn.kept.shape[1] % 8)).view(lanes, -1, 8) * self._bit_values
            self._kept[:lanes].index_copy_(1, self._cursor, bits.sum(-1, dtype=torch.uint8)[:, None])
        self._cursor += 1

    def _forward(
        self, ids: Tensor, positions: Tensor, rows: Tensor, attend: Callable[[int, Tensor], Tensor], *, hidden: bool
    ) -> Tensor:
        decoder = self.decoder
        x = F.embedding(ids, decoder.embed.weight)
        y: Tensor | None = None
        for index, layer in enumerate(cast("list[DecoderLayer]", decoder.layers)):
            h = fused.add_norm(x, y, layer.norm1.weight, decoder.shape.norm_eps)
            qkv = layer.qkv(h)
            q = fused.rotate_store(decoder, layer, qkv, positions, rows, self.cache)
            if not hidden and index == len(decoder.layers) - 1:
                return x  # prefill: all keys and values are written
            y = layer.out(attend(index, q).flatten(1))
            h = fused.add_norm(x, y, layer.norm2.weight, decoder.shape.norm_eps)
            y = layer.down(fused.gate(layer.gate_up(h)))
        return fused.add_norm(x, y, decoder.norm.weight, decoder.shape.norm_eps)

    def _capture(self, lanes: int, kind: DrawKind) -> torch.cuda.CUDAGraph:
        """Capture a step; the ones that warm up run on lanes that are idle, and so change nothing."""
        with self._idle():
            self.captured[lanes, kind] = graph = self._capture_work(lambda: self._step(lanes, kind))
        return graph

    @contextmanager
    def _idle(self) -> Generator[None]:
        """While work is captured, all lanes are idle."""
        kept = self._state.clone(), self._cursor.clone()
        self._state[3].zero_()
        try:
            yield
        finally:
            self._cursor.copy_(kept[1])
            self._state.copy_(kept[0])

    def _capture_pass(self, size: int) -> torch.cuda.CUDAGraph:
        """Capture a prefill pass; the ones that warm up write to row 0 alone."""
        ids, rows, (context, blocks) = self._prompts
        rows.zero_()
        blocks.zero_()
        prompts = PrefillInput(ids[:, :size], rows[:size], PrefillBlocks(context, blocks[:size]))
        self.captured_passes[size] = graph = self._capture_work(lambda: self._prefill(prompts))
        return graph

    def _capture_work(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        for _ in range(WARM_UP):
            work()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: that would give back the memory that the trainer has cached, and may collect garbage, each time.
        # The trainer's thread may allocate meanwhile, hence the mode.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        self._pool = graph.pool()
        return graph

    def _fetch(self, lanes: int, steps: int, kept: Tensor | None, *, likely: bool) -> StepResults:
        # All of it, and a part on the host: a copy of a part would take a launch more.
        values, *others = self._copies(self._out[:lanes], kept, self._likely[:lanes, :steps] if likely else None)
        assert values is not None
        return StepResults(values[:, :steps], self._record(), *others)

    def _copies(self, *parts: Tensor | None) -> list[Tensor | None]:
        """Queue copies to the host, into separate memory."""
        copy = torch.clone if self._stream is None else self._download
        return [None if part is None else copy(part) for part in parts]

    def _record(self) -> torch.cuda.Event | None:
        """An event after all that is queued."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @staticmethod
    def _download(values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return host

    def _upload(self, array: "NDArray[np.generic]") -> Tensor:
        tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        return tensor if self._stream is None else tensor.pin_memory().to(self.device, non_blocking=True)

    def queue(self) -> AbstractContextManager[Any]:
        """Within it, work is queued on the stream of the lanes. To enter the stream takes a while: enter it once for much work."""
        if self._stream is None or torch.cuda.current_stream(self.device) == self._stream:
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.decoder.parameters(), *self.adapters.tensors())]
