"""Decode steps on the device: a lane per running request, whose state never leaves the device between steps.

A step embeds each lane's token, runs the layers over the paged cache, draws the next token and decides whether the reply ends
with it. Steps are captured as CUDA graphs, one per batch size, and replayed without a look at their results; the host reads the
tokens of several steps in one copy. Weights are used where they are: changing them in place needs no new capture.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from penstock.records import Sampling

MAX_STOPS = 8
"""Stop ids that the device compares with; a request with more is stopped by the host."""

RING = 512
"""Uniform numbers kept per lane, by position."""

WARM_UP = 2


@dataclass(eq=False, slots=True)
class StepResults:
    """Tokens of some steps, on their way to the host."""

    values: Tensor
    """[lanes, steps, 3]: id (-1 where the lane was idle), log-probability, full log-probability."""
    done: torch.cuda.Event | None

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
        self.captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._storage = self._addresses()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, lanes: int, steps: int, *, truncated: bool) -> StepResults:
        """Queue `steps` steps of the first `lanes` lanes."""
        with self._queue():
            self._cursor.zero_()
            if self.graphs_enabled:
                graph = self.captured.get((lanes, truncated)) or self._capture(lanes, truncated)
                for _ in range(steps):
                    graph.replay()
            else:
                for _ in range(steps):
                    self._step(lanes, truncated)
            return self._fetch(self._out[:lanes, :steps])

    def prefill(self, prompts: "PackedPrompts") -> None:
        """Queue a pass that computes keys and values."""
        with self._queue():
            packed = PrefillBlocks(self._upload(prompts.context), self._upload(prompts.blocks))

            def attend(layer: int, q: Tensor) -> Tensor:
                return fused.prefill_attention(q, self.cache.keys[layer], self.cache.values[layer], packed)

            ids, positions, rows = (self._upload(part) for part in prompts[:3])
            if self.adapters.policies:
                self.adapters.choose(self._upload(prompts.adapters))
            self._forward(ids, positions, rows, attend, hidden=False)

    def begin(
        self,
        lanes: Sequence[int],
        state: Sequence[tuple[int, int, int]],
        samplings: Sequence[Sampling],
        stops: Sequence[Sequence[int]],
        adapters: Sequence[int],
    ) -> None:
        """Start lanes: token, position and limit of each; the reply ends when the context has `limit` tokens."""
        params = np.array([(s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings], dtype=np.float32)
        padded = np.array([[*ids, *[-1] * (MAX_STOPS - len(ids))] for ids in stops], dtype=np.int64)
        with self._queue():
            index = self._upload(np.array(lanes, dtype=np.int64))
            self._state.index_copy_(1, index, self._upload(np.array([(*s, 1) for s in state], dtype=np.int64)).t())
            self._params.index_copy_(0, index, self._upload(params))
            self._stops.index_copy_(0, index, self._upload(padded))
            self._slots.index_copy_(0, index, self._upload(np.array(adapters, dtype=np.int64)))

    def fill(
        self, at: NDArray[np.int64], rows: NDArray[np.int32], ring_at: NDArray[np.int64], uniforms: NDArray[np.float64]
    ) -> None:
        """Write rows and uniform numbers; `at` and `ring_at` count through all lanes."""
        with self._queue():
            self._table.view(-1).index_copy_(0, self._upload(at), self._upload(rows))
            self._ring.view(-1).index_copy_(0, self._upload(ring_at), self._upload(uniforms))

    def end(self, lanes: Sequence[int]) -> None:
        """Stop lanes whose requests are gone; the device may have stopped them already."""
        with self._queue():
            self._state[3].index_fill_(0, self._upload(np.array(lanes, dtype=np.int64)), 0)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        with self._queue():
            old, new = (self._upload(np.array(lanes, dtype=np.int64)) for lanes in (source, target))
            self._state.index_copy_(1, new, self._state[:, old])
            for part in (self._params, self._stops, self._slots, self._table, self._ring):
                part.index_copy_(0, new, part[old])
            self._state[3].index_fill_(0, old, 0)

    def clear(self) -> None:
        """Stop all lanes, and `renew`."""
        self.renew()
        with self._queue():
            self._state.zero_()

    def renew(self) -> None:
        """From here on, use weights as they were changed elsewhere, moved ones too."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if (storage := self._addresses()) != self._storage:
            self.captured, self._storage = {}, storage

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _step(self, lanes: int, truncated: bool) -> None:
        rows, lengths, uniforms = self._rows[:lanes], self._lengths[:lanes], self._uniforms[:lanes]
        fused.locate(self._state, self._table, self._ring, rows, lengths, uniforms)
        ids, positions = self._state[0, :lanes], self._state[1, :lanes]

        def attend(layer: int, q: Tensor) -> Tensor:
            return fused.decode_attention(q, self.cache.keys[layer], self.cache.values[layer], self._table, lengths)

        if self.adapters.policies:
            self.adapters.choose(self._slots[:lanes])
        hidden = self._forward(ids, positions, rows, attend, hidden=True)
        head = self.decoder.embed.weight if self.decoder.head is None else self.decoder.head.weight
        drawn = fused.draw(F.linear(hidden, head), self._params[:lanes], uniforms, truncated=truncated)
        fused.advance(self._state, self._stops, drawn, self._cursor, self._out)
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

    def _capture(self, lanes: int, truncated: bool) -> torch.cuda.CUDAGraph:
        """Capture a step; the ones that warm up run on lanes that are idle, and so change nothing."""
        kept = self._state.clone(), self._cursor.clone()
        self._state[3].zero_()
        for _ in range(WARM_UP):
            self._step(lanes, truncated)
        self._cursor.copy_(kept[1])
        self.wait()
        graph = torch.cuda.CUDAGraph()
        # The trainer's thread may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._step(lanes, truncated)
        self._pool = graph.pool()
        self._state.copy_(kept[0])
        self.captured[lanes, truncated] = graph
        return graph

    def _fetch(self, values: Tensor) -> StepResults:
        if self._stream is None:
            return StepResults(values.clone(), None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return StepResults(host, event)

    def _upload(self, array: "NDArray[np.generic]") -> Tensor:
        tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
        return tensor if self._stream is None else tensor.pin_memory().to(self.device, non_blocking=True)

    def _queue(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.decoder.parameters(), *self.adapters.tensors())]
