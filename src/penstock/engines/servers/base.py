"""How the events of an engine's reply become tokens: every column as long as the ids, or the reply is not believed."""

import asyncio
import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

import orjson
from pydantic import Field, ValidationInfo, field_validator

from penstock.config import EngineSection
from penstock.engines.base import SampledChunk
from penstock.engines.fleet import EngineServer
from penstock.engines.retry import FleetClient, RetryPolicy, ServerRequest
from penstock.engines.servers.model_files import ModelContents, PublishedWeights, check_same_shape
from penstock.errors import ConfigError, EngineError
from penstock.http.client import ErrorKind, HttpClient, RequestTimeouts, UpstreamError
from penstock.records import Finish, Sampling

MIN_LOGPROB, MAX_LOGPROB = -9999.0, 1e-3
"""A log-probability is between these: the first is vLLM's word for minus infinity, the second leaves room for rounding."""


def is_plain(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the plain softmax."""
    return sampling.temperature == 1.0 and not sampling.truncated


class ReplyReader(ABC):
    """Reads the events of one reply, all of it sampled under one policy version."""

    def __init__(self, prompt: list[int], sampling: Sampling, *, version: int) -> None:
        self.done = False
        self._prompt = prompt
        self._greedy, self._plain = sampling.temperature == 0.0, is_plain(sampling)
        self._version = version
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None

    def take(self, event: bytes) -> None:
        """Add an event; what follows the end of the reply is left out."""
        if self.done:
            return
        if event == b"[DONE]":
            raise UpstreamError("ended without saying how the reply finished", kind="broken")
        try:
            parsed: dict[str, Any] = orjson.loads(event)
            if "error" in parsed:
                raise _reported(parsed["error"])
            self.read(parsed)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as cause:
            text = event[:100].decode("utf-8", "replace")
            raise UpstreamError(f"sent an event that no reply has: {text}", kind="garbled") from cause

    def drain(self) -> SampledChunk | None:
        """All tokens since the last call."""
        if not self._ids and not self.done:
            return None
        ids, given, self._ids, self._logprobs = tuple(self._ids), tuple(self._logprobs), [], []
        return SampledChunk(
            ids=ids,
            logprobs=(0.0,) * len(ids) if self._greedy else given,
            full_logprobs=given if self._greedy or self._plain else (),
            versions=(self._version,) * len(ids),
            finish=self._finish,
        )

    @abstractmethod
    def read(self, event: dict[str, Any]) -> None:
        """Call `add` with what an event holds; a KeyError, TypeError or AttributeError says that it makes no sense."""

    def add(self, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        """Add tokens, and how the reply finished where `reason` says so."""
        if len(ids) != len(logprobs):
            raise UpstreamError(f"sent {len(ids)} token ids with {len(logprobs)} log-probabilities", kind="garbled")
        if not all(type(i) is int and i >= 0 for i in ids):
            raise UpstreamError(f"sent token ids that are none: {ids}", kind="garbled")
        if not all(MIN_LOGPROB < x <= MAX_LOGPROB for x in logprobs):
            raise UpstreamError(f"sent log-probabilities that are none ({logprobs}); see its --logprobs-mode", kind="garbled")
        if reason not in (None, "stop", "length"):
            raise UpstreamError(f"broke the reply off ({reason})", kind="broken")
        self._ids += ids
        self._logprobs += logprobs
        self._finish, self.done = reason, reason is not None


def _reported(error: Any) -> UpstreamError:
    """The fault that an error event within a stream stands for."""
    if isinstance(error, str):
        return UpstreamError(f"reported an error: {error}", kind="broken")
    code = error.get("code") or 500
    kind: ErrorKind = "busy" if code in (429, 503) else "refused" if 400 <= code < 500 else "broken"
    return UpstreamError(f"reported an error: {error.get('message')}", kind=kind)


LOAD_S = 600.0
"""For a server to read weights."""


class ServedModel(NamedTuple):
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
        served: ServedModel,
        folder: Path = Path(),
        timers: RequestTimeouts | None = None,
        patience: RetryPolicy | None = None,
        key: str = "",
    ) -> None:
        self._name, self._served, self._version = name, served, 0
        self._run = secrets.token_hex(4)
        """Tells our weights on a server from another run's."""
        self._start = self._publication(0, folder)
        self._published: PublishedWeights | None = None
        """What every server is to hold; None where they hold what they were started with."""
        self._loading = asyncio.Lock()
        self.upstream = FleetClient(
            urls,
            self._check_server,
            probe=self._probe,
            leave=self.leave,
            timers=timers or RequestTimeouts(),
            patience=patience or RetryPolicy(),
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
    ) -> AsyncGenerator[SampledChunk, None]:
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
        yield SampledChunk((), (), (), (), finish="length")  # interrupted between the last token and the word that it was the last

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
    async def inspect(cls, wire: HttpClient, url: str, name: str) -> ServedModel:
        """What the server at `url` serves: the model of this name, else its only one."""

    @abstractmethod
    def body(self, prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
        """What a server is asked for, under this key where it takes one; nothing is left to its own defaults."""

    @abstractmethod
    def reader(self, prompt: list[int], sampling: Sampling, address: EngineServer) -> ReplyReader:
        """Reads the reply of the server at `address`."""

    @abstractmethod
    def check_sampling(self, sampling: Sampling) -> None:
        """EngineError where a server would change this quietly, or could not say with which probability a token was drawn."""

    async def leave(self, url: str, key: str) -> None:  # noqa: B027
        """Say that nobody reads the reply to this request any more, to a server that does not see it from the hang-up."""

    @abstractmethod
    async def take(self, url: str, wanted: PublishedWeights) -> None:
        """Let the server at `url` take weights, between two of its steps, and forget what it computed from those before."""

    async def obstacle(self, url: str, model: ModelContents) -> str:
        """Why the server at `url` must not be given weights of this model; empty where nothing is known against it."""
        return ""

    @abstractmethod
    async def label(self, url: str) -> str:
        """What the server at `url` calls the weights that it holds."""

    def _publication(self, version: int, folder: Path) -> PublishedWeights:
        return PublishedWeights(version, folder.absolute(), f"penstock-{self._run}-{version}")

    def _attempts(self, prompt: list[int], sampling: Sampling) -> Callable[[EngineServer], ServerRequest[SampledChunk]]:
        def begin(address: EngineServer) -> ServerRequest[SampledChunk]:
            key = secrets.token_hex(16)
            return ServerRequest(orjson.dumps(self.body(prompt, sampling, key)), self.reader(prompt, sampling, address), key)

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

    async def _check_servers(self, found: ModelContents) -> None:
        """EngineError where weights of this model would do a server harm, or not all of them would reach it."""
        for address in self.upstream.fleet.addresses:
            if address.up.is_set():
                try:
                    obstacle = await self.obstacle(address.url, found)
                except UpstreamError as fault:
                    raise EngineError(f"{fault}; {self.trainable}") from fault
                if obstacle:
                    raise EngineError(f"{address.url} cannot be trained: {obstacle}")

    async def _switch(self, wanted: PublishedWeights) -> list[str]:
        """Let the servers that are up take weights, or all of them where none is; what went wrong, by server."""
        fleet = self.upstream.fleet
        faults: list[str] = []

        async def one(address: EngineServer) -> None:
            try:
                await fleet.switch(address, wanted.version, lambda: self.take(address.url, wanted))
            except UpstreamError as fault:
                faults.append(str(fault))

        async with asyncio.TaskGroup() as group:
            for address in [address for address in fleet.addresses if address.up.is_set()] or fleet.addresses:
                group.create_task(one(address))
        return faults

    async def _check_server(self, address: EngineServer) -> None:
        served = await self.inspect(self.upstream.wire, address.url, self._name)
        if served != self._served:
            raise UpstreamError(f"{address.url} serves {served}, the others {self._served}", kind="refused")
        wanted = None
        while wanted is not self._published:  # it may have changed meanwhile
            wanted = self._published
            assert wanted is not None
            await self._restore(address, wanted)

    async def _restore(self, address: EngineServer, wanted: PublishedWeights) -> None:
        """See that a server that was away holds what it is to hold."""
        if await self.label(address.url) != wanted.label:
            address.call_back()
            address.switching = True
            try:
                await self.take(address.url, wanted)
            finally:
                address.switching = False
        address.version = wanted.version

    async def _probe(self, address: EngineServer) -> None:
        wanted = self._published
        if wanted is None or address.version != wanted.version:
            await self.upstream.wire.ask(f"{address.url}/health")
            return
        label = await self.label(address.url)
        if label != wanted.label and wanted is self._published and address.version == wanted.version:
            address.call_back()  # what they sample from now on is not what they would be stamped with
            raise UpstreamError(f"{address.url} no longer holds policy version {wanted.version}; it says {label!r}", kind="broken")


def _seed(seed: int | None, part: int) -> int | None:
    """Of the part of a reply that follows the `part`-th interruption: another one each, or its draws would repeat."""
    if seed is None or not part:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{part}".encode(), digest_size=4).digest(), "big") >> 1


EMBEDDED_ONLY = ("device", "dtype", "slots", "queue", "cache_tokens")


class HttpEngineSection(EngineSection):
    """What `[engine]` takes for whatever answers over HTTP."""

    retries: int = Field(default=4, ge=0)
    """How often a request that no server would take is sent again after a wait, before its first token."""
    retry_s: float = Field(default=600.0, gt=0)
    """No attempt at a request begins later than this after its first."""
    first_token_s: float = Field(default=300.0, gt=0)
    """Longest wait for the first token, in the server's queue too; then another attempt is made."""
    stall_s: float = Field(default=120.0, gt=0)
    """Longest silence between two tokens; then the reply is given up."""

    @field_validator(*EMBEDDED_ONLY)
    @classmethod
    def _not_ours(cls, value: object, at: ValidationInfo) -> object:
        if value != EngineSection.model_fields[at.field_name or ""].default:
            raise ValueError("is a setting of the embedded engine; the servers have their own, leave it out")
        return value


class RemoteSection(HttpEngineSection):
    """`[engine]` for vLLM and SGLang servers."""

    needs_url: ClassVar[bool] = True

    url: tuple[str, ...] = Field(min_length=1)
    """Addresses of servers with the same model, such as `http://10.0.0.1:8000`."""
    api_key_env: str = ""
    """The environment variable that holds the servers' key; empty sends none."""

    def addresses(self) -> list[str]:
        """The plain addresses; ConfigError where one is none or stands there twice."""
        urls = [check_url(url).removesuffix("/v1").rstrip("/") for url in self.url]
        if len(set(urls)) < len(urls):
            raise ConfigError("engine.url: an address stands there twice")
        return urls

    def key(self) -> str:
        """The servers' key, from the environment."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise ConfigError(f"engine.api_key_env: the environment has no {self.api_key_env}; set it to the servers' key")
        return key


E = TypeVar("E", bound=RemoteEngine)


class FleetInspection(NamedTuple):
    """What a fleet of servers says of itself."""

    served: ServedModel
    down: frozenset[str]
    """Addresses that do not answer."""


def open_remote(engine: type[E], folder: Path, *, name: str, section: RemoteSection) -> E:
    """Ask the servers what they serve, and serve it as policy version 0. Blocks: call it in a thread.

    An address that does not answer is left out until it does, as long as another one answers.
    """
    urls, key = section.addresses(), section.key()
    served, down = inspect_servers(engine, urls, name, key)
    opened = engine(
        urls,
        name=name,
        served=served,
        folder=folder,
        timers=RequestTimeouts(first_token_s=section.first_token_s, stall_s=section.stall_s),
        patience=RetryPolicy(retries=section.retries, retry_s=section.retry_s),
        key=key,
    )
    for address in opened.upstream.fleet.addresses:
        if address.url in down:
            address.up.clear()
    return opened


def inspect_servers(engine: type[RemoteEngine], urls: Sequence[str], name: str, key: str) -> FleetInspection:
    """Ask every server; ConfigError where none answers, or where they differ. Blocks."""
    with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
        found, faults = thread.submit(asyncio.run, _ask_all(engine, urls, name, key)).result()
    if not found:
        raise ConfigError(f"engine.url: {'; '.join(map(str, faults.values()))}; start {engine.kind} there, or change engine.url")
    if len(set(found.values())) > 1:
        told = "; ".join(f"{url} has {served}" for url, served in found.items())
        raise ConfigError(f"engine.url: the servers differ: {told}; start all of them alike")
    return FleetInspection(next(iter(found.values())), frozenset(faults))


async def _ask_all(
    engine: type[RemoteEngine], urls: Sequence[str], name: str, key: str
) -> tuple[dict[str, ServedModel], dict[str, UpstreamError]]:
    wire = HttpClient(RequestTimeouts(), key=key)
    found: dict[str, ServedModel] = {}
    faults: dict[str, UpstreamError] = {}
    try:
        for url in urls:
            try:
                found[url] = await engine.inspect(wire, url, name)
            except UpstreamError as fault:
                faults[url] = fault
    finally:
        await wire.close()
    return found, faults


def check_url(url: str) -> str:
    """`url` without a slash at its end; ConfigError where it is not the plain address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"engine.url = {url!r}: write it like http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("engine.url: an address has no user, password, query or fragment; put the key in engine.api_key_env")
    return url.rstrip("/")
