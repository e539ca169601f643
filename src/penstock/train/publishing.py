"""How new weights reach the engine: in place, as adapters, or to servers by a transfer, a folder in shared memory or one on disk.

Ways to servers are tried in this order, as far as both ends can take them; what fails by one is reported and tried by the next. A
transfer is followed by a folder, written while training continues: a server that restarts reads the current weights from there.
"""

import asyncio
import base64
import glob
import pickle
import secrets
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.multiprocessing import reductions

from penstock.config import RunConfig
from penstock.engines.base import Engine
from penstock.engines.embedded.decoder import Decoder, copy_settings, public_tensors
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.servers.server_weights import TransferRound, WeightSender
from penstock.engines.servers.vllm import VllmEngine
from penstock.errors import ConfigError, EngineError
from penstock.events import Events
from penstock.run.folder import RunFolder
from penstock.train.learner import Learner

PUBLISHED_KEPT = 2
"""Keep the folder that is served and the one before, which a slow reader may still have open."""


class Publication(NamedTuple):
    """How the last version reached servers."""

    way: str
    seconds: float
    bytes: int


class Publisher(Protocol):
    """Brings new weights to the engine."""

    async def begin(self) -> None:
        """Makes the engine serve the start policy as version 0."""
        ...

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        """Runs `change`, which rewrites the learner's weights in place, then makes the engine sample with `version`."""
        ...


class InPlacePublisher:
    """For an engine that shares the learner's tensors: it applies the change between two tokens."""

    def __init__(self, engine: Engine, learner: Learner) -> None:
        self._engine, self._learner = engine, learner

    async def begin(self) -> None:
        """Rounds the start policy as all later versions are, so that version 1 differs from it by the update alone."""
        if self._learner.rounds:
            await self._engine.swap(0, self._learner.publish)

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        await self._engine.swap(version, change)


class AdapterPublisher:
    """For an engine in this process that serves the learners' adapters on top of their base: it copies them between two tokens."""

    def __init__(self, engine: EmbeddedEngine, learners: Mapping[str, Learner]) -> None:
        self._engine = engine
        self._adapters = {policy: learner.adapter for policy, learner in learners.items() if learner.adapter is not None}

    async def begin(self) -> None:
        await self.publish(0, lambda: None)

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        await self._engine.put_adapters(version, self._adapters, change=change)


class FolderPublisher:
    """For an engine with its own weights: writes each version as a model folder, which `load` makes the engine read."""

    def __init__(
        self,
        learner: Learner,
        *,
        model: Path,
        scratch: Path,
        load: Callable[[int, Path], Awaitable[None]],
        in_use: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        """`in_use` returns folders that the engine may read again."""
        self.last: Publication | None = None
        self._learner, self._model, self._scratch, self._load, self._in_use = learner, model, scratch, load, in_use
        self._way = "a folder on disk" if learner.adapter is None else "an adapter"
        shutil.rmtree(scratch, ignore_errors=True)

    async def begin(self) -> None:
        """Loads the start policy, as a server may still hold the weights of an earlier run; rounded, if later versions are.

        An adapter that adds nothing yet is loaded too: a server that cannot take it fails before the first rollout.
        """
        if self._learner.rounds or self._learner.adapter is not None:
            await self.publish(0, self._learner.publish)
        else:
            await self._load(0, self._model)

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        folder = self._scratch / f"{version:06d}"
        await asyncio.to_thread(change)
        begun = time.perf_counter()
        await asyncio.to_thread(self._write, folder)
        await self._load(version, folder)
        self.last = Publication(self._way, time.perf_counter() - begun, self._learner.size)
        for old in sorted(self._scratch.iterdir())[:-PUBLISHED_KEPT]:
            if old.absolute() not in self._in_use():
                await asyncio.to_thread(shutil.rmtree, old)

    def _write(self, folder: Path) -> None:
        copy_settings(self._model, folder)
        self._learner.save_weights(folder)


class PolicyPublishers:
    """For several policies on servers: publishes each one, all under one number."""

    def __init__(self, publishers: Iterable[FolderPublisher]) -> None:
        self._publishers = list(publishers)

    @property
    def last(self) -> Publication | None:
        parts = [publisher.last for publisher in self._publishers if publisher.last is not None]
        if not parts:
            return None
        return Publication(f"{len(parts)} adapters", sum(part.seconds for part in parts), sum(part.bytes for part in parts))

    async def begin(self) -> None:
        for publisher in self._publishers:
            await publisher.begin()

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        """Runs `change` once, which rewrites the weights of all policies."""
        for publisher in self._publishers:
            await publisher.publish(version, change)
            change = _no_change


def _no_change() -> None: ...


SHARED_MEMORY = Path("/dev/shm")
NEEDS = {
    "ipc": 'the learner must be on the servers\' GPU, and they started with --weight-transfer-config \'{"backend": "ipc"}\', '
    "VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_INSECURE_SERIALIZATION=1",
    "nccl": "the learner must be on a GPU and vllm installed here, and the servers started with "
    '--weight-transfer-config \'{"backend": "nccl"}\' and VLLM_SERVER_DEV_MODE=1',
    "memory": "the servers must be on this machine, and /dev/shm have room for three versions",
}
MAX_FAILURES = 2
"""A way that fails so often in a row is not tried any more."""


class TransferEngine(Protocol):
    async def load(self, version: int, folder: Path) -> None: ...

    async def transfer(self, version: int, sender: WeightSender, folder: Path, written: asyncio.Event) -> None:
        """Like `load`, from the sender's memory. `folder` holds the same weights once `written` is set."""
        ...


class PublicationWay(NamedTuple):
    name: str
    folder: Path
    """Where versions are written."""
    sender: WeightSender | None = None
    """None reads them from there."""


class ServerPublisher:
    """A `Publisher` for servers that take whole weights."""

    def __init__(
        self, engine: TransferEngine, learner: Learner, *, model: Path, ways: Sequence[PublicationWay], events: Events
    ) -> None:
        self.last: Publication | None = None
        self._engine, self._learner, self._model, self._events = engine, learner, model, events
        self._ways = list(ways)
        self._failures = dict.fromkeys(ways, 0)
        self._writing: asyncio.Task[None] | None = None
        for way in ways:
            shutil.rmtree(way.folder, ignore_errors=True)

    async def begin(self) -> None:
        """Publishes the start policy, as a server may still hold the weights of an earlier run; rounded, if later versions are."""
        names = ", else ".join(way.name for way in self._ways)
        text = f"{self._learner.size / 1e6:,.0f} MB of weights go to the servers by {names}"
        self._events.emit("stage", text=text, ways=[way.name for way in self._ways])
        if self._learner.rounds:
            await self.publish(0, self._learner.publish)
        else:
            await self._engine.load(0, self._model)

    async def publish(self, version: int, change: Callable[[], None]) -> None:
        await self.settle()
        await asyncio.to_thread(change)
        begun = time.perf_counter()
        ways = list(self._ways)
        for way, following in zip(ways, [*ways[1:], None], strict=True):
            try:
                await self._send(way, version)
            except EngineError as error:
                if following is None:
                    raise
                self._count_failure(way, version, f"{error}; tried again by {following.name}")
            else:
                self._failures[way] = 0
                self.last = Publication(way.name, time.perf_counter() - begun, self._learner.size)
                return

    async def settle(self) -> None:
        """Wait until the folder of the last version is written: after that its weights may change."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def close(self) -> None:
        """Remove what was written for servers; the checkpoints are elsewhere."""
        await self.settle()
        for way in self._failures:
            await asyncio.to_thread(shutil.rmtree, way.folder, ignore_errors=True)

    async def _send(self, way: PublicationWay, version: int) -> None:
        folder = way.folder / f"{version:06d}"
        if way.sender is None:
            await asyncio.to_thread(self._write, folder)
            await self._engine.load(version, folder)
        else:
            written = asyncio.Event()
            await self._engine.transfer(version, way.sender, folder, written)
            self._writing = asyncio.create_task(self._write_behind(folder, written), name="penstock-write-published")
        for old in sorted(way.folder.iterdir())[:-PUBLISHED_KEPT] if way.folder.exists() else ():
            await asyncio.to_thread(shutil.rmtree, old)

    def _count_failure(self, way: PublicationWay, version: int, text: str) -> None:
        self._failures[way] += 1
        if self._failures[way] >= MAX_FAILURES:
            self._ways.remove(way)
            text += f", and from now on: it has failed {MAX_FAILURES} times in a row"
        self._events.emit("publish.failed", version=version, way=way.name, text=f"version {version} failed by {way.name}: {text}")

    async def _write_behind(self, folder: Path, written: asyncio.Event) -> None:
        try:
            await asyncio.to_thread(self._write, folder)
            written.set()
        except EngineError as error:
            self._events.emit("publish.failed", text=f"{error}; a server that restarts now would lack these weights")

    def _write(self, folder: Path) -> None:
        try:
            copy_settings(self._model, folder)
            self._learner.save_weights(folder)
        except (OSError, SafetensorError) as cause:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(f"{folder} could not be written: {cause}") from cause


async def publication_ways(config: RunConfig, engine: VllmEngine, decoder: Decoder, folder: RunFolder) -> list[PublicationWay]:
    """The ways that both ends can take, the quickest first; a way that `engine.weights` names comes first, and the folder last."""
    wanted: str = getattr(config.engine, "weights", "auto")
    disk, memory = folder.path / "served", memory_folder(folder.id or folder.path.name)
    backend = await engine.transfer_backend() if wanted in ("auto", "ipc", "nccl") else ""
    local = all(is_local(server.url) for server in engine.client.fleet.servers)
    size = sum(weight.numel() * weight.element_size() for weight in decoder.parameters())
    ways = [PublicationWay("a folder on disk", disk)]
    if local and wanted != "folder" and has_room(SHARED_MEMORY, (PUBLISHED_KEPT + 1) * size):
        ways.insert(0, PublicationWay("a folder in shared memory", memory))
        engine.remove_if_killed(memory)
    if decoder.device.type == "cuda" and backend == "ipc" and local:
        ways.insert(0, PublicationWay("CUDA IPC", ways[0].folder, IpcSender(decoder)))
    if decoder.device.type == "cuda" and backend == "nccl" and NcclSender.is_installed():
        ways.insert(0, PublicationWay("NCCL", ways[0].folder, NcclSender(decoder)))
    has = {"ipc": "CUDA IPC", "nccl": "NCCL", "memory": "a folder in shared memory"}.get(wanted)
    if has and has not in [way.name for way in ways]:
        raise ConfigError(f"engine.weights = {wanted!r} cannot be used here: {NEEDS[wanted]}; leave it at 'auto'")
    return ways


def memory_folder(run: str) -> Path:
    """A folder in shared memory, of this process alone; those of earlier ones of the same run are removed."""
    for left in SHARED_MEMORY.glob(f"penstock-{glob.escape(run)}-*"):
        shutil.rmtree(left, ignore_errors=True)
    return SHARED_MEMORY / f"penstock-{run}-{secrets.token_hex(4)}"


def is_local(url: str) -> bool:
    """Whether a server is on this machine, as far as its address shows."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")


def has_room(folder: Path, size: int) -> bool:
    try:
        return shutil.disk_usage(folder).free > size
    except OSError:
        return False


def describe(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "names": list(weights),
        "dtype_names": [str(value.dtype).removeprefix("torch.") for value in weights.values()],
        "shapes": [list(value.shape) for value in weights.values()],
    }


class IpcSender:
    """Hands a server on the same GPU the addresses of the learner's own tensors, which it copies.

    vLLM takes the addresses as a pickle, and only where VLLM_ALLOW_INSECURE_SERIALIZATION=1 allows it.
    """

    backend = "ipc"

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._kept: dict[str, Tensor] = {}
        """What was sent last: nothing else keeps copies alive that the server may still read."""

    def connect(self, url: str, world_size: int) -> TransferRound:
        return TransferRound({})

    def send(self, url: str) -> TransferRound:
        torch.cuda.synchronize(self._decoder.device)
        self._kept = {name: value.contiguous() for name, value in public_tensors(self._decoder).items()}
        gpu = str(cast("Any", torch.cuda.get_device_properties(self._decoder.device)).uuid)
        share = cast("Callable[[Tensor], tuple[Any, Any]]", reductions.reduce_tensor)  # pyright: ignore[reportUnknownMemberType]
        handles = [{gpu: share(value)[1]} for value in self._kept.values()]
        return TransferRound(describe(self._kept) | {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()})


class NcclSender:
    """Broadcasts the learner's tensors to a server's workers on other GPUs, with vLLM's own communicator."""

    backend = "nccl"

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._groups: dict[str, Any] = {}

    @staticmethod
    def is_installed() -> bool:
        return find_spec("vllm") is not None

    def connect(self, url: str, world_size: int) -> TransferRound:
        address, port = _own_address(url), _free_port()

        def join() -> None:
            from vllm.distributed.device_communicators.pynccl import (  # pyright: ignore[reportMissingImports]
                PyNcclCommunicator,  # pyright: ignore[reportUnknownVariableType]
            )
            from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore

            group: Any = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size + 1)  # pyright: ignore
            self._groups[url] = PyNcclCommunicator(group, device=self._decoder.device)

        ranks = {"rank_offset": 1, "world_size": world_size + 1}
        return TransferRound({"master_address": address, "master_port": port, **ranks}, join)

    def send(self, url: str) -> TransferRound:
        weights = public_tensors(self._decoder)

        def broadcast() -> None:
            with torch.cuda.device(self._decoder.device):
                stream = torch.cuda.current_stream()
                for value in weights.values():
                    self._groups[url].broadcast(value.contiguous(), src=0, stream=stream)
                stream.synchronize()

        return TransferRound(describe(weights), broadcast)


def _own_address(url: str) -> str:
    """The address under which the server at `url` reaches this machine."""
    host = url.split("://", 1)[1].rsplit("/", 1)[0].rsplit(":", 1)[0].strip("[]")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return probe.getsockname()[0]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
