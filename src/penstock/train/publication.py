"""How new weights reach servers: by a transfer from memory to memory, by a folder in shared memory, or by one on disk.

The ways are tried in this order, as far as both ends can take them; what fails by one is told and tried by the next. A transfer is
followed by a folder, written while training goes on: a server that restarts reads the current weights from there.
"""

import asyncio
import glob
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from safetensors import SafetensorError

from penstock.config import RunConfig
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.servers.transfer import WeightSender
from penstock.engines.servers.vllm import VllmEngine
from penstock.errors import ConfigError, EngineError
from penstock.events import Events
from penstock.run.folder import RunFolder
from penstock.train.learner import Learner
from penstock.train.policy import PUBLISHED_KEPT, Publication, copy_settings
from penstock.train.weight_senders import IpcSender, NcclSender

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
    """Whether a server is on this machine, as far as its address tells."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")


def has_room(folder: Path, size: int) -> bool:
    try:
        return shutil.disk_usage(folder).free > size
    except OSError:
        return False
