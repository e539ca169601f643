"""Weights on servers: published folders and their checks, adapters by version, and weights sent from memory."""

import asyncio
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from penstock.errors import EngineError
from penstock.http.client import UpstreamError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
OPTIONAL_TENSORS = ("lm_head.weight", "rotary_emb.inv_freq")
"""Name endings of tensors that some tools save and others leave out, because they can be derived."""

Shapes = dict[str, tuple[int, ...]]


class PublishedWeights(NamedTuple):
    """Weights that servers should hold."""

    version: int
    folder: Path
    """Absolute; servers open it under the same path."""
    label: str
    """The label that a server reports while it holds them."""
    written: asyncio.Event | None = None
    """Set once the folder is complete, for weights that were sent in another way first; None if it was from the start."""


class ModelContents(NamedTuple):
    shapes: Shapes
    config: dict[str, Any]
    vocabulary: int


def check_same_shape(folder: Path, start: Path, context_length: int) -> ModelContents:
    """Read `folder`; EngineError if it is incomplete, has other tensors than `start`, or a shorter context than is served."""
    shapes = read_shapes(folder)
    try:
        config = _read_json(folder / "config.json")
    except (OSError, ValueError) as cause:
        raise EngineError(f"{folder} has no config.json that can be read: {cause}") from cause
    _compare(shapes, read_shapes(start), folder)
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and context_length > longest:
        raise EngineError(f"the servers have a context of {context_length} tokens, the model in {folder} one of {longest}")
    return ModelContents(shapes, config, read_vocabulary(folder))


def read_vocabulary(folder: Path) -> int:
    """The number of token ids that the model in `folder` knows, by its config, else by its tokenizer; 0 if neither says."""
    try:
        config = _read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if size is None:
            tokenizer = _read_json(folder / "tokenizer.json")
            ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer.get("added_tokens", []))]
            size = max(ids, default=-1) + 1
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return 0
    return size if isinstance(size, int) and size > 0 else 0


def read_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in the folder's safetensors files; EngineError if a file is incomplete."""
    try:
        shards = sorted(set(_read_json(folder / INDEX)["weight_map"].values())) if (folder / INDEX).exists() else [WEIGHTS]
        shapes: Shapes = {}
        for shard in shards:
            shapes |= _read_header(folder / shard)
        return shapes
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as cause:
        raise EngineError(f"{folder} does not hold whole weights: {cause}") from cause


def _read_header(file: Path) -> Shapes:
    with file.open("rb") as weights:
        (length,) = struct.unpack("<Q", weights.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} has no header")
        header: dict[str, Any] = orjson.loads(weights.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if file.stat().st_size != end:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes in place of {end}")
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}


def _compare(shapes: Shapes, served: Shapes, folder: Path) -> None:
    unmatched = sorted(name for name in shapes.keys() ^ served.keys() if not name.endswith(OPTIONAL_TENSORS))
    different = sorted(name for name in shapes.keys() & served.keys() if shapes[name] != served[name])
    if unmatched or different:
        name = (unmatched or different)[0]
        text = f"{name} is {_shape_text(shapes, name)}, served is {_shape_text(served, name)}"
        raise EngineError(f"{folder} holds a model of another shape: {text}")


def _shape_text(shapes: Shapes, name: str) -> str:
    return "x".join(map(str, shapes[name])) if name in shapes else "not there"


def _read_json(file: Path) -> dict[str, Any]:
    return orjson.loads(file.read_bytes())


# Adapters


class ServedAdapter(NamedTuple):
    policy: str
    version: int
    folder: Path
    """Absolute; servers open it under the same path, perhaps again when they have set the adapter aside for others."""
    name: str
    """On the servers; no other run or version has it."""


class ServedAdapters:
    """The adapters that servers hold or should hold, each version under its own name: a request names the one that samples it.

    So no request is paused or computed again for a new version, and a server's cache, which is keyed by the name, never mixes two.
    A version is loaded before it is announced, and unloaded once it is not the newest and no request uses it.
    """

    def __init__(self) -> None:
        self._newest: dict[str, ServedAdapter] = {}
        self._older: list[ServedAdapter] = []
        self._requests: Counter[str] = Counter()
        """Running ones, by the adapter's name."""
        self._unloaded: list[ServedAdapter] = []
        """Their files may be deleted when the next version is announced."""

    def __bool__(self) -> bool:
        return bool(self._newest)

    def loaded(self) -> list[ServedAdapter]:
        return [*self._newest.values(), *self._older]

    def announce(self, adapter: ServedAdapter) -> list[ServedAdapter]:
        """Makes new requests of the policy use this one; returns what nobody uses any more, to be unloaded."""
        if before := self._newest.get(adapter.policy):
            self._older.append(before)
        self._newest[adapter.policy] = adapter
        self._unloaded = [old for old in self._older if not self._requests[old.name]]
        self._older = [old for old in self._older if self._requests[old.name]]
        return self._unloaded

    def version(self, policy: str) -> int:
        """Of the policy's newest adapter; 0 if it has none."""
        newest = self._newest.get(policy)
        return newest.version if newest else 0

    def folders(self) -> set[Path]:
        """Folders that servers may still read."""
        return {adapter.folder for adapter in (*self.loaded(), *self._unloaded)}

    @contextmanager
    def using(self, policy: str) -> Generator[ServedAdapter | None]:
        """The policy's newest adapter, kept loaded inside; None if it has none."""
        adapter = self._newest.get(policy)
        if adapter is None:
            yield None
            return
        self._requests[adapter.name] += 1
        try:
            yield adapter
        finally:
            self._requests[adapter.name] -= 1


def adapter_roots(listed: Any, url: str) -> dict[str, str]:
    """The adapters in an answer of `/v1/models`: their folders by name."""
    try:
        return {str(entry["id"]): str(entry.get("root") or "") for entry in listed["data"] if entry.get("parent")}
    except (KeyError, TypeError, AttributeError) as cause:
        raise UpstreamError(f"{url}/v1/models does not say what is served", kind="garbled") from cause


# Weights sent from the trainer's memory


class TransferRound(NamedTuple):
    """The two sides of one exchange with a server."""

    info: dict[str, Any]
    """What is sent to the server."""
    work: Callable[[], None] | None = None
    """What this side does while the server does its part, such as a broadcast. It blocks, perhaps for ever."""


class WeightSender(Protocol):
    """The trainer's side of a transfer. Its methods run in a thread."""

    backend: str
    """As vLLM's `--weight-transfer-config` names it."""

    def connect(self, url: str, world_size: int) -> TransferRound:
        """Make ready for a server with so many workers; called once for each start of the server."""
        ...

    def send(self, url: str) -> TransferRound:
        """Send all weights as they are now."""
        ...


async def exchange(request: Coroutine[Any, Any, Any], work: Callable[[], None] | None, limit_s: float) -> None:
    """Do both sides at once; UpstreamError if one fails or takes longer than `limit_s`.

    A collective operation has no timeout: its thread is abandoned if the other side does not come, and is a daemon so that it
    cannot keep the process from ending.
    """
    done = asyncio.get_running_loop().create_future()
    if work is None:
        done.set_result(None)
    else:
        threading.Thread(target=_run, args=(work, done), name="penstock-transfer", daemon=True).start()
    asking = asyncio.ensure_future(request)
    both: set[asyncio.Future[Any]] = {asking, done}
    try:
        # After an error of one side, the other would wait in vain.
        finished, waiting = await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for future in (asking, done):
            if future in finished:
                future.result()
        if waiting:
            raise UpstreamError(f"the transfer of weights took longer than {limit_s:g} s", kind="broken", status=504)
    finally:
        asking.cancel()
        await asyncio.wait({asking})


def _run(work: Callable[[], None], done: asyncio.Future[None]) -> None:
    def finish(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    failed = None
    try:
        work()
    except Exception as cause:
        failed = UpstreamError(f"the trainer's side of the transfer failed: {cause}", kind="broken", status=500)
    if not done.get_loop().is_closed():
        done.get_loop().call_soon_threadsafe(finish, failed)
