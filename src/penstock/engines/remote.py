"""Engines behind HTTP: what vLLM and SGLang have in common. Token ids in; ids and log-probabilities out, over a fleet of servers.

New weights reach a server as a model folder that both sides see under one path. The server takes them in a moment in which it
samples nothing of ours: requests under way are called back first, and go on afterwards with what they had sampled so far as part
of their prompt. So every token was sampled whole under one version, the one that its server held, and no reply is lost or begun
again. Servers recompute the keys and values of a continued reply in any case: those of other weights are of no use.
"""

import asyncio
import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import orjson

from penstock.engines.base import Sampled
from penstock.engines.fleet import Address
from penstock.engines.published import Contents, Published, check_same_shape
from penstock.engines.reply import ReplyReader
from penstock.engines.upstream import Attempt, Patience, Upstream
from penstock.engines.wire import Fault, Timers, Wire
from penstock.errors import EngineError
from penstock.records import Sampling

LOAD_S = 600.0
"""For a server to read weights."""


class Served(NamedTuple):
    """What a server serves."""

    model: str
    """As the server calls it."""
    context_length: int
    processed: bool
    """Whether its log-probabilities are under the distribution sampled from."""
    seeded: bool = True
    """Whether it honours seeds."""


class RemoteEngine(ABC):
    """A fleet of servers, as one engine. A class below says how one kind of server is spoken to."""

    kind: ClassVar[str]
    """What the servers are."""
    path: ClassVar[str]
    """Where requests go."""
    trainable: ClassVar[str]
    """How a server is started so that it takes weights."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        served: Served,
        folder: Path = Path(),
        timers: Timers | None = None,
        patience: Patience | None = None,
        key: str = "",
    ) -> None:
        self._name, self._served, self._version = name, served, 0
        self._run = secrets.token_hex(4)
        """Tells our weights on a server from another run's."""
        self._start = self._publication(0, folder)
        self._published: Published | None = None
        """What every server is to hold; None where they hold what they were started with."""
        self._loading = asyncio.Lock()
        self.upstream = Upstream(
            urls,
            self._check_server,
            probe=self._probe,
            leave=self.leave,
            timers=timers or Timers(),
            patience=patience or Patience(),
            key=key,
        )

    @property
    def model(self) -> str:
        """The name that `/v1/models` shows."""
        return self._name

    @property
    def context_length(self) -> int:
        """Prompt and reply together must fit in this many tokens."""
        return self._served.context_length

    @property
    def version(self) -> int:
        """The policy version that was loaded last; 0 is the one that the servers were started with."""
        return self._version

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[Sampled, None]:
        """Sample one reply; see `Engine.generate`. Stop strings are left to the caller, who closes the generator at one.

        A reply that new weights interrupt is taken up again where it was, under the new version.
        """
        self._check(prompt_ids, sampling)
        ids, parts = list(prompt_ids), 0
        while (left := len(prompt_ids) + sampling.max_tokens - len(ids)) > 0:
            rest = replace(sampling, max_tokens=left, seed=_seed(sampling.seed, parts))
            async with aclosing(self.upstream.stream(self.path, self._attempts(list(ids), rest), rollout_id=rollout_id)) as chunks:
                async for chunk in chunks:
                    ids += chunk.ids
                    yield chunk
                    if chunk.finish is not None:
                        return
            parts += 1
        yield Sampled((), (), (), (), finish="length")  # interrupted between the last token and the word that it was the last

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        """Refused: `change` rewrites weights in this process, and the servers hold their own."""
        raise EngineError(
            f"policy version {version} cannot be swapped in: {self.kind} servers hold weights of their own; "
            "publish a model folder and `load` it"
        )

    async def load(self, version: int, folder: Path) -> None:
        """Let every server take the weights of a model folder, which must be under the same path there; see `Engine.load`.

        A server that does not take them rests until it has. Where none does, all of them get the version before again.
        """
        wanted = self._publication(version, folder)
        found = await asyncio.to_thread(check_same_shape, wanted.folder, self._start.folder, self.context_length)
        async with self._loading:
            if self._published is None:
                await self._check_servers(found)
            before, self._published = self._published or self._start, wanted
            faults = await self._switch(wanted)
            if not any(address.up.is_set() and address.version == version for address in self.upstream.fleet.addresses):
                self._published = before
                await self._switch(before)
                raise EngineError(f"policy version {version} was taken by no server: {'; '.join(faults)}; {self.trainable}")
            self._version = version

    async def close(self) -> None:
        """Fail what is running and let go of all connections."""
        await self.upstream.close()

    @classmethod
    @abstractmethod
    async def inspect(cls, wire: Wire, url: str, name: str) -> Served:
        """What the server at `url` serves: the model of this name, else its only one."""

    @abstractmethod
    def body(self, prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
        """What a server is asked for, under this key where it takes one; nothing is left to its own defaults."""

    @abstractmethod
    def reader(self, prompt: list[int], sampling: Sampling, address: Address) -> ReplyReader:
        """Reads the reply of the server at `address`."""

    @abstractmethod
    def check_sampling(self, sampling: Sampling) -> None:
        """EngineError where a server would change this quietly, or could not say with which probability a token was drawn."""

    async def leave(self, url: str, key: str) -> None:  # noqa: B027
        """Say that nobody reads the reply to this request any more, to a server that does not see it from the hang-up."""

    @abstractmethod
    async def take(self, url: str, wanted: Published) -> None:
        """Let the server at `url` take weights, between two of its steps, and forget what it computed from those before."""

    async def obstacle(self, url: str, model: Contents) -> str:
        """Why the server at `url` must not be given weights of this model; empty where nothing is known against it."""
        return ""

    @abstractmethod
    async def label(self, url: str) -> str:
        """What the server at `url` calls the weights that it holds."""

    def _publication(self, version: int, folder: Path) -> Published:
        return Published(version, folder.absolute(), f"penstock-{self._run}-{version}")

    def _attempts(self, prompt: list[int], sampling: Sampling) -> Callable[[Address], Attempt[Sampled]]:
        def begin(address: Address) -> Attempt[Sampled]:
            key = secrets.token_hex(16)
            return Attempt(orjson.dumps(self.body(prompt, sampling, key)), self.reader(prompt, sampling, address), key)

        return begin

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        length, most = len(prompt_ids), sampling.max_tokens
        if not length:
            raise EngineError("the prompt has no tokens; send at least one")
        if most < 1:
            raise EngineError(f"max_tokens = {most}: ask for at least one token")
        if length + most > self.context_length:  # the server would shorten max_tokens without a word
            raise EngineError(
                f"{length} prompt tokens and max_tokens = {most} exceed the context of {self.context_length}; shorten one of them"
            )
        self.check_sampling(sampling)

    async def _check_servers(self, found: Contents) -> None:
        """EngineError where weights of this model would do a server harm, or not all of them would reach it."""
        for address in self.upstream.fleet.addresses:
            if address.up.is_set():
                try:
                    obstacle = await self.obstacle(address.url, found)
                except Fault as fault:
                    raise EngineError(f"{fault}; {self.trainable}") from fault
                if obstacle:
                    raise EngineError(f"{address.url} cannot be trained: {obstacle}")

    async def _switch(self, wanted: Published) -> list[str]:
        """Let the servers that are up take weights, or all of them where none is; what went wrong, by server."""
        fleet = self.upstream.fleet
        faults: list[str] = []

        async def one(address: Address) -> None:
            try:
                await fleet.switch(address, wanted.version, lambda: self.take(address.url, wanted))
            except Fault as fault:
                faults.append(str(fault))

        async with asyncio.TaskGroup() as group:
            for address in [address for address in fleet.addresses if address.up.is_set()] or fleet.addresses:
                group.create_task(one(address))
        return faults

    async def _check_server(self, address: Address) -> None:
        served = await self.inspect(self.upstream.wire, address.url, self._name)
        if served != self._served:
            raise Fault(f"{address.url} serves {served}, the others {self._served}", kind="refused")
        wanted = None
        while wanted is not self._published:  # it may have changed meanwhile
            wanted = self._published
            assert wanted is not None
            await self._restore(address, wanted)

    async def _restore(self, address: Address, wanted: Published) -> None:
        """See that a server that was away holds what it is to hold."""
        if await self.label(address.url) != wanted.label:
            address.call_back()
            address.switching = True
            try:
                await self.take(address.url, wanted)
            finally:
                address.switching = False
        address.version = wanted.version

    async def _probe(self, address: Address) -> None:
        wanted = self._published
        if wanted is None or address.version != wanted.version:
            await self.upstream.wire.ask(f"{address.url}/health")
            return
        label = await self.label(address.url)
        if label != wanted.label and wanted is self._published and address.version == wanted.version:
            address.call_back()  # what they sample from now on is not what they would be stamped with
            raise Fault(f"{address.url} no longer holds policy version {wanted.version}; it says {label!r}", kind="broken")


def _seed(seed: int | None, part: int) -> int | None:
    """Of the part of a reply that follows the `part`-th interruption: another one each, or its draws would repeat."""
    if seed is None or not part:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{part}".encode(), digest_size=4).digest(), "big") >> 1
