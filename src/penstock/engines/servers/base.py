"""Engines behind HTTP servers that take token ids. `vllm` and `sglang` say how each kind of server is spoken to."""

import asyncio
import hashlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import orjson

from penstock.config import home_folder
from penstock.engines.base import SampledChunk, SentPicture
from penstock.engines.checkpoint_files import is_adapter, read_adapter_config
from penstock.engines.fleet import EngineServer
from penstock.engines.retry import FleetClient, RetryPolicy, ServerRequest
from penstock.engines.servers import pauses
from penstock.engines.servers.pauses import (
    RESUME_S,
    PausedServers,
    Recovery,
    RecoverySteps,
    ServerCall,
)
from penstock.engines.servers.replies import ReplyReader, is_plain
from penstock.engines.servers.server_weights import (
    ModelContents,
    PublishedWeights,
    ServedAdapter,
    ServedAdapters,
    check_same_shape,
    read_vocabulary,
)
from penstock.engines.servers.settings import RemoteSection
from penstock.errors import ConfigError, EngineError, EngineRefused, ModelError, RequestError
from penstock.http.client import HttpClient, RequestTimeouts, UpstreamError
from penstock.records import Sampling
from penstock.system.async_tools import finish_shielded

LOAD_S = 600.0
"""Timeout for a server to read weights."""
CONTROL_S = 30.0
"""Timeout of a request that neither samples nor reads weights."""
LABEL_PREFIX = "penstock-"
"""Of every name that we give to weights on a server."""

log = logging.getLogger(__name__)


class RemoteModel(NamedTuple):
    """What a server says about its model."""

    model: str
    """The server's name for it."""
    context_length: int
    processed: bool
    """Whether its log-probabilities are under the distribution sampled from."""
    seeded: bool = True
    """Whether it honours seeds."""
    vocabulary: int = 0
    """The number of its token ids; 0 if it does not say."""

    def is_like(self, other: "RemoteModel") -> bool:
        """Whether two servers may serve one run."""
        known = {self.vocabulary, other.vocabulary} - {0}
        return self._replace(vocabulary=0) == other._replace(vocabulary=0) and len(known) < 2


class RemoteEngine(ABC):
    """A fleet of servers with the same model, as one engine."""

    kind: ClassVar[str]
    """What the servers are, for messages."""
    path: ClassVar[str]
    """Where requests go."""
    picture_path: ClassVar[str] = ""
    """Where requests with pictures go; empty if the servers take none."""
    pause_call: ClassVar[ServerCall]
    resume_call: ClassVar[ServerCall]
    load_remedy: ClassVar[str]
    """How a server must be started so that it can load weights."""
    adapter_remedy: ClassVar[str]
    """How a server must be started so that it can load adapters."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        served: RemoteModel,
        folder: Path = Path(),
        timeouts: RequestTimeouts | None = None,
        policy: RetryPolicy | None = None,
        key: str = "",
        load_s: float = LOAD_S,
        control_s: float = CONTROL_S,
    ) -> None:
        self._name, self._served, self._version = name, served, 0
        self.vocabulary = min(filter(None, (served.vocabulary, read_vocabulary(folder))), default=0)
        """Ids from this one on are never sent: a server's GPU may fail for good at one that its model lacks."""
        self._load_s, self._control_s = load_s, control_s
        self._key, self._paused_servers = key, PausedServers(paused_folder(), key)
        self._run = secrets.token_hex(4)
        """Distinguishes our weights on a server from another run's."""
        self._initial = self._weights(0, folder)
        self._published: PublishedWeights | None = None
        """What every server should hold; None while they hold what they were started with."""
        self._served_last = self._initial
        """What a server held that served; it gets these back where newer weights fail."""
        self._adapters = ServedAdapters()
        self._loading = asyncio.Lock()
        self._unsure: set[str] = set()
        """Servers whose weights may be incomplete, whatever they call them, because a change failed."""
        self._looked_for_leftovers = False
        self.client = FleetClient(
            urls,
            self._check_server,
            probe=self._probe,
            abort=self.abort,
            timeouts=timeouts or RequestTimeouts(),
            policy=policy or RetryPolicy(),
            key=key,
        )

    @property
    def model(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        return self._served.context_length

    @property
    def version(self) -> int:
        """The policy version that was loaded last; 0 is the one that the servers were started with."""
        return self._version

    def version_of(self, policy: str) -> int:
        """The version of the adapter that the next request of a policy will be sampled with."""
        return self._adapters.version(policy)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        rollout_id: str = "",
        policy: str = "",
        pictures: Sequence[SentPicture] = (),
    ) -> AsyncGenerator[SampledChunk, None]:
        """Sample one reply; see `Engine.generate`. Stop strings are left to the caller, who closes the generator at one.

        A reply that is interrupted by new weights is continued after its last token, under the new version. One of a policy with
        an adapter is not interrupted: it ends under the version that it began with.
        """
        self._check_request(prompt_ids, sampling)
        if self._published is None and not self._adapters and not self._looked_for_leftovers:
            self._looked_for_leftovers = True
            await self._tell_leftovers()
        ids, parts, path = list(prompt_ids), 0, self.picture_path if pictures else self.path
        while (left := len(prompt_ids) + sampling.max_tokens - len(ids)) > 0:
            rest = replace(sampling, max_tokens=left, seed=_part_seed(sampling.seed, parts))
            with self._adapters.using(policy) as adapter:
                prepare, name = self._prepare(list(ids), rest, adapter, pictures), adapter.name if adapter else ""
                async with aclosing(self.client.stream(path, prepare, rollout_id=rollout_id, missing=name)) as chunks:
                    async for chunk in chunks:
                        ids += chunk.ids
                        yield chunk
                        if chunk.finish is not None:
                            return
            parts += 1
            if sampling.grammar is not None:  # the server would start the grammar from its beginning
                raise EngineError(
                    "a reply that follows a grammar was interrupted by new weights and cannot be continued; ask again"
                )
        # Interrupted after the last allowed token but before the server sent its finish reason.
        yield SampledChunk((), (), (), (), finish="length")

    async def swap(self, version: int, change: Callable[[], None]) -> None:
        """Refused: `change` rewrites weights in this process, and the servers hold their own."""
        raise EngineError(
            f"policy version {version} cannot be swapped in: {self.kind} servers hold their own weights; "
            "publish a model folder and `load` it"
        )

    async def load(self, version: int, folder: Path, *, policy: str = "") -> None:
        """Load the weights of a model folder into every server; see `Engine.load`. The folder must have the same path there.

        A server that fails to load them is down until it has. If all fail, the previous version is loaded again. An adapter's
        folder is loaded in addition to what is there, and new requests of the policy use it.
        """
        wanted = self._weights(version, folder)
        if is_adapter(folder):
            async with self._loading:
                name = f"{policy or 'policy'}-v{version}-{self._run}"
                await self._load_adapter(ServedAdapter(policy, version, wanted.folder, name))
            return
        contents = await asyncio.to_thread(check_same_shape, wanted.folder, self._initial.folder, self.context_length)
        async with self._loading:
            if self._published is None:
                await self._check_loadable(contents)
            await self._publish(wanted, self.change_weights)

    async def _load_adapter(self, adapter: ServedAdapter) -> None:
        try:
            await asyncio.to_thread(read_adapter_config, adapter.folder)
        except ModelError as cause:
            raise EngineError(f"policy version {adapter.version} cannot be loaded: {cause}") from cause
        if not self._adapters and self._published is None and (left := await self._find_leftovers()):
            raise EngineError(f"{left}, and adapters would be added to them; restart it")
        deadline = asyncio.get_running_loop().time() + self.client.policy.down_s
        while errors := await self._offer_adapter(adapter):
            if not await self._wait_for_server(errors, deadline):
                reasons = "; ".join(map(str, errors))
                raise EngineError(f"policy version {adapter.version} was taken by no server: {reasons}; {self.adapter_remedy}")
        if not self._adapters:
            await self._unload_leftovers(adapter.folder.parent)
        unused = self._adapters.announce(adapter)
        self._version = max(self._version, adapter.version)
        for server in self.client.fleet.servers:
            for old in unused:
                with suppress(UpstreamError):  # it is down, or was restarted: it holds the adapter no longer
                    await self.unload_adapter(server.url, old.name)

    async def _offer_adapter(self, adapter: ServedAdapter) -> list[UpstreamError]:
        """Let all servers that are up load an adapter; returns the errors if none has."""
        fleet = self.client.fleet
        servers = [server for server in fleet.servers if server.up.is_set()] or fleet.servers
        errors: dict[EngineServer, UpstreamError] = {}

        async def load(server: EngineServer) -> None:
            try:
                await self.load_adapter(server.url, adapter)
            except UpstreamError as error:
                errors[server] = error

        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(load(server))
        if len(errors) == len(servers):
            return list(errors.values())
        for server, error in errors.items():
            fleet.put_down(server, error)  # until `_check_server` has loaded it there
        return []

    async def _unload_leftovers(self, folder: Path) -> None:
        """Unload adapters that an earlier process of this run, which was killed, has left."""
        for server in self.client.fleet.servers:
            with suppress(UpstreamError):
                for name, root in (await self.listed_adapters(server.url)).items():
                    if Path(root).is_relative_to(folder) and self._run not in name:
                        await self.unload_adapter(server.url, name)

    async def _find_leftovers(self) -> str:
        """Describes a server whose weights are those of an earlier run, in words; empty if none is known to be."""
        for server in self.client.fleet.servers:
            with suppress(UpstreamError):
                if server.up.is_set() and (label := await self.weights_label(server.url)).startswith(LABEL_PREFIX):
                    return f"{server.url} holds weights that a training run has left there ({label})"
        return ""

    async def _tell_leftovers(self) -> None:
        if left := await self._find_leftovers():
            log.warning("%s; replies are sampled with them, restart it to have those of its model", left)

    def folders_in_use(self) -> set[Path]:
        """Folders of adapters that a server may still read; do not delete them."""
        return self._adapters.folders()

    async def _publish(self, wanted: PublishedWeights, change: "ChangeWeights") -> None:
        before, self._published = self._published or self._initial, wanted
        deadline = asyncio.get_running_loop().time() + self.client.policy.down_s
        while True:
            errors = await self._switch_all(wanted, change)
            if any(server.up.is_set() and server.version == wanted.version for server in self.client.fleet.servers):
                break
            self._published = before
            if not await self._wait_for_server(errors, deadline):
                await self._switch_all(before, self.change_weights)
                reasons = "; ".join(map(str, errors))
                raise EngineError(f"policy version {wanted.version} was taken by no server: {reasons}; {self.load_remedy}")
            self._published = wanted
        self._served_last, self._version = wanted, wanted.version

    async def _wait_for_server(self, errors: Sequence[UpstreamError], deadline: float) -> bool:
        """Wait for a server to come back if all are gone; False if one is there, or past the deadline."""
        if any(error.status or error.kind != "broken" for error in errors):
            return False
        log.warning("no server is there to take new weights: %s; waiting for one", errors[0] if errors else "all are down")
        try:
            async with asyncio.timeout_at(deadline):
                await self.client.fleet.wait_until_up()
        except TimeoutError:
            return False
        return True

    def remove_if_killed(self, folder: Path) -> None:
        """Have a folder of published weights removed if this process dies."""
        self._paused_servers.remove_if_killed(folder)

    async def close(self) -> None:
        await self.client.close()
        await self._paused_servers.close()

    @classmethod
    def preflight(cls, section: RemoteSection, model: str) -> None:
        """ConfigError if no server answers, or if they differ. Blocks."""
        inspect_servers(cls, section.addresses(), model, section.key())

    # What each kind of server does in its own way

    @classmethod
    @abstractmethod
    async def inspect(cls, http: HttpClient, url: str, name: str) -> RemoteModel:
        """Ask the server at `url` about the model of this name, else about its only one."""

    @abstractmethod
    def body(self, prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
        """The request body, with `key` as its id if the server takes one. It leaves nothing to the server's defaults."""

    @abstractmethod
    def reader(self, prompt: list[int], sampling: Sampling, server: EngineServer) -> ReplyReader: ...

    def picture_body(self, prompt: list[int], sampling: Sampling, pictures: Sequence[SentPicture]) -> dict[str, Any]:
        """The body of a request to `picture_path`."""
        raise NotImplementedError

    def picture_reader(self, prompt: list[int], sampling: Sampling, server: EngineServer) -> ReplyReader:
        raise NotImplementedError

    @abstractmethod
    def check_sampling(self, sampling: Sampling) -> None:
        """EngineRefused if the server would silently change these settings."""

    def behaviour_known(self, sampling: Sampling) -> bool:
        """Whether the server reports log-probabilities under the distribution that it samples from, not only the plain softmax."""
        return self._served.processed or sampling.temperature == 0.0 or is_plain(sampling)

    async def abort(self, url: str, key: str) -> None:  # noqa: B027
        """Stop a request, for servers that do not notice a closed connection."""

    @abstractmethod
    async def change_weights(self, url: str, wanted: PublishedWeights) -> None:
        """Let the paused server at `url` read weights from their folder, and drop what it computed from the old ones."""

    @abstractmethod
    def with_adapter(self, body: dict[str, Any], name: str) -> dict[str, Any]:
        """The body of a request that samples with an adapter."""

    @abstractmethod
    async def load_adapter(self, url: str, adapter: ServedAdapter) -> None:
        """Let the server at `url` load an adapter under its name; no error if it holds it already."""

    @abstractmethod
    async def unload_adapter(self, url: str, name: str) -> None: ...

    @abstractmethod
    async def listed_adapters(self, url: str) -> dict[str, str]:
        """The adapters that the server at `url` holds: their folders by name."""

    @abstractmethod
    def recovery_steps(self, url: str, before: PublishedWeights) -> RecoverySteps:
        """What makes the paused server at `url` serve again after new weights failed; the last step resumes it."""

    async def load_obstacle(self, url: str, model: ModelContents) -> str:
        """Why the server at `url` must not load weights of this model; empty if no reason is known."""
        return ""

    @abstractmethod
    async def weights_label(self, url: str) -> str:
        """The label of the weights that the server at `url` holds."""

    async def server_start(self, url: str) -> str:
        """When the server at `url` was started, for one that cannot name its weights; else empty."""
        return ""

    def _check_request(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        length, most = len(prompt_ids), sampling.max_tokens
        if not length:
            raise EngineRefused("the prompt has no tokens; send at least one")
        if most < 1:
            raise EngineRefused(f"max_tokens = {most}: ask for at least one token")
        self._check_ids(prompt_ids, sampling.stop_ids)
        if length + most > self.context_length:  # the server would silently reduce max_tokens
            raise EngineRefused(
                f"{length} prompt tokens and max_tokens = {most} exceed the context of {self.context_length}; shorten one of them"
            )
        self.check_sampling(sampling)

    def _check_ids(self, *sent: Sequence[int]) -> None:
        if not self.vocabulary:
            raise EngineError("no token is sent to a server whose vocabulary is unknown; name a model folder with a config.json")
        for ids in filter(None, sent):
            if not 0 <= min(ids) <= max(ids) < self.vocabulary:
                worst = min(ids) if min(ids) < 0 else max(ids)
                raise RequestError(f"token {worst} is none of the model's: it has {self.vocabulary}, counted from 0")

    def _prepare(
        self, prompt: list[int], sampling: Sampling, adapter: ServedAdapter | None, pictures: Sequence[SentPicture]
    ) -> Callable[[EngineServer], ServerRequest[SampledChunk]]:
        def prepare(server: EngineServer) -> ServerRequest[SampledChunk]:
            key = secrets.token_hex(16)
            if pictures:
                body, reader = self.picture_body(prompt, sampling, pictures), self.picture_reader(prompt, sampling, server)
            else:
                body, reader = self.body(prompt, sampling, key), self.reader(prompt, sampling, server)
            if adapter is not None:
                body, reader.version = self.with_adapter(body, adapter.name), adapter.version
            return ServerRequest(orjson.dumps(body), reader, key)

        return prepare

    def _weights(self, version: int, folder: Path) -> PublishedWeights:
        return PublishedWeights(version, folder.absolute(), f"{LABEL_PREFIX}{self._run}-{version}")

    async def _check_loadable(self, contents: ModelContents) -> None:
        """EngineError if weights of this model would crash a server, or would not reach all of its layers."""
        for server in self.client.fleet.servers:
            if server.up.is_set():
                try:
                    obstacle = await self.load_obstacle(server.url, contents)
                except UpstreamError as error:
                    raise EngineError(f"{error}; {self.load_remedy}") from error
                if obstacle:
                    raise EngineError(f"{server.url} cannot be trained: {obstacle}")

    async def _switch_all(self, wanted: PublishedWeights, change: "ChangeWeights") -> list[UpstreamError]:
        """Let the servers that are up take weights, or all servers if none is up. Returns the errors."""
        fleet = self.client.fleet
        errors: list[UpstreamError] = []

        async def switch(server: EngineServer) -> None:
            try:
                await fleet.switch(server, wanted.version, lambda: self._load_weights(server.url, wanted, change))
            except UpstreamError as error:
                errors.append(error)

        async with asyncio.TaskGroup() as group:
            for server in [server for server in fleet.servers if server.up.is_set()] or fleet.servers:
                group.create_task(switch(server))
        return errors

    async def _load_weights(self, url: str, wanted: PublishedWeights, change: "ChangeWeights") -> None:
        """Let a server take weights between two of its steps. If anything fails, it continues with the previous ones.

        Requests of other clients wait, and continue under the new weights.
        """
        async with self.paused(url):
            await change(url, wanted)

    @asynccontextmanager
    async def paused(self, url: str) -> AsyncGenerator[None]:
        """Pause a server. It is resumed on leaving, on an error after its recovery, and if this process dies."""
        steps = self.recovery_steps(url, self._served_last)
        if not await self._paused_servers.add(url, steps, changed=await self.server_start(url)):
            raise UpstreamError(f"{url} is being changed by another run on this machine", kind="busy", status=503)
        resume = steps[-1:]
        try:
            await self.post(url, self.pause_call)
            resume = steps
            self._unsure.add(url)
            yield
            self._unsure.discard(url)
            resume = steps[-1:]
        finally:
            # In a thread with its own client: this may run while all else is being closed.
            await finish_shielded(self._bring_back(Recovery(url, resume, self._key)))
        if url in self._paused_servers:
            raise UpstreamError(f"{url} could not be resumed", kind="broken")

    async def _bring_back(self, recovery: Recovery) -> None:
        if await asyncio.to_thread(recovery.run, resume_s=min(RESUME_S, self._load_s), step_s=self._load_s):
            self._paused_servers.discard(recovery.url)
        else:
            log.warning("%s could not be resumed; it is tried again", recovery.url)

    async def post(self, url: str, call: ServerCall, *, limit_s: float | None = None) -> Any:
        """Send a request and return the answer, parsed; UpstreamError unless it is the server's own."""
        answer = await self.client.http.request_json(url + call.path, call.body, limit_s=limit_s or self._control_s)
        if call.answer and call.answer not in str(answer):
            raise UpstreamError(f"{url}{call.path} answered {str(answer)[:100]!r}, not {call.answer!r}", kind="garbled", status=200)
        return answer

    async def _check_server(self, server: EngineServer) -> None:
        """The fleet's thorough check: a server that was down serves the same model and holds the published weights."""
        if server.url in self._paused_servers:
            await self._bring_back(Recovery(server.url, self.recovery_steps(server.url, self._served_last), self._key))
        served = await self.inspect(self.client.http, server.url, self._name)
        if not served.is_like(self._served):
            raise UpstreamError(f"{server.url} serves {served}, the others {self._served}", kind="refused")
        for adapter in self._adapters.loaded():
            await self.load_adapter(server.url, adapter)
        wanted = None
        while wanted is not self._published:  # `load` may publish a newer version during the awaits below
            wanted = self._published
            assert wanted is not None
            await self._restore(server, wanted)

    async def _restore(self, server: EngineServer, wanted: PublishedWeights) -> None:
        if server.url in self._unsure or await self.weights_label(server.url) != wanted.label:
            server.cancel_requests()
            server.switching = True
            try:
                await self._load_weights(server.url, wanted, self.change_weights)
            finally:
                server.switching = False
        server.version = wanted.version

    async def _probe(self, server: EngineServer) -> None:
        """The fleet's cheap check: the server is alive and holds the weights that its tokens are recorded under."""
        if self._adapters:
            held = await self.listed_adapters(server.url)
            if lost := [adapter.name for adapter in self._adapters.loaded() if adapter.name not in held]:
                raise UpstreamError(f"{server.url} no longer holds {lost[0]}", kind="broken")
            return
        wanted = self._published
        if wanted is None or server.version != wanted.version:
            await self.client.http.request_json(f"{server.url}/health")
            return
        label = await self.weights_label(server.url)
        if label != wanted.label and wanted is self._published and server.version == wanted.version:
            server.cancel_requests()  # from here on their tokens would be recorded under a version that did not sample them
            raise UpstreamError(f"{server.url} no longer holds policy version {wanted.version}; it says {label!r}", kind="broken")


ChangeWeights = Callable[[str, PublishedWeights], Awaitable[None]]
"""Makes the paused server at a URL hold weights."""


def _part_seed(seed: int | None, part: int) -> int | None:
    """The seed of a reply's part after its `part`-th interruption. With the first seed again, its draws would repeat."""
    if seed is None or not part:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{part}".encode(), digest_size=4).digest(), "big") >> 1


# Opening

E = TypeVar("E", bound=RemoteEngine)


class FleetInspection(NamedTuple):
    """What the servers of a fleet say about themselves."""

    served: RemoteModel
    down: frozenset[str]
    """URLs that do not answer."""


def open_remote(engine: type[E], folder: Path, *, name: str, section: RemoteSection) -> E:
    """Ask the servers what they serve, and serve it as policy version 0. Blocks: call it in a thread.

    A server that does not answer is down until it does, as long as another one answers.
    """
    urls, key = section.addresses(), section.key()
    served, down = inspect_servers(engine, urls, name, key)
    opened = engine(
        urls,
        name=name,
        served=served,
        folder=folder,
        timeouts=RequestTimeouts(first_token_s=section.first_token_s, stall_s=section.stall_s),
        policy=RetryPolicy(retries=section.retries, retry_s=section.retry_s, down_s=section.down_s),
        key=key,
    )
    if not opened.vocabulary:
        raise ConfigError(
            f"{folder}: neither config.json nor tokenizer.json says how many tokens (vocab_size) the model knows; pull it again"
        )
    for server in opened.client.fleet.servers:
        if server.url in down:
            server.up.clear()
    return opened


def inspect_servers(engine: type[RemoteEngine], urls: Sequence[str], name: str, key: str) -> FleetInspection:
    """Ask every server; ConfigError if none answers, or if they differ. Blocks."""
    with ThreadPoolExecutor(1) as thread:  # asyncio.run would fail in this thread if it has a running event loop
        found, errors = thread.submit(asyncio.run, _inspect_all(engine, urls, name, key)).result()
    if not found:
        raise ConfigError(f"engine.url: {'; '.join(map(str, errors.values()))}; start {engine.kind} there, or change engine.url")
    first = max(found.values(), key=lambda served: served.vocabulary)
    if not all(served.is_like(first) for served in found.values()):
        differences = "; ".join(f"{url} has {served}" for url, served in found.items())
        raise ConfigError(f"engine.url: the servers differ: {differences}; start all of them alike")
    return FleetInspection(first, frozenset(errors))


async def _inspect_all(
    engine: type[RemoteEngine], urls: Sequence[str], name: str, key: str
) -> tuple[dict[str, RemoteModel], dict[str, UpstreamError]]:
    http = HttpClient(RequestTimeouts(), key=key)
    found: dict[str, RemoteModel] = {}
    errors: dict[str, UpstreamError] = {}
    try:
        for url in urls:
            try:
                await bring_back_left(url, key)
                found[url] = await engine.inspect(http, url, name)
            except UpstreamError as error:
                errors[url] = error
    finally:
        await http.close()
    return found, errors


# Servers that a dead run left paused


def paused_folder() -> Path:
    return home_folder() / "paused"


async def bring_back_left(url: str, key: str) -> None:
    """Resume a server that a run on this machine left paused when it died."""
    resumed = await asyncio.to_thread(pauses.bring_back_left, paused_folder(), url, key)
    if resumed is False:
        raise UpstreamError(f"{url} was left paused by an earlier run and cannot be resumed; restart it", kind="broken")
    if resumed:
        log.warning("%s was left paused by an earlier run that died; it was resumed", url)
