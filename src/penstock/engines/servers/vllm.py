"""Engine for vLLM servers of versions 0.22 to 0.32: `/v1/completions` with token ids, and weights changed in place.

What a server can do is read from what it says about itself (`/version`, `/openapi.json`, `/v1/models`, `/server_info`, `/metrics`).
docs/design/vllm-servers.md has a table of what differs between versions.
"""

import asyncio
import random
import re
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, cast

from penstock.engines.base import RenderedPicture, SentPicture
from penstock.engines.fleet import EngineServer
from penstock.engines.retry import RetryState
from penstock.engines.servers.base import (
    CONTROL_S,
    LABEL_PREFIX,
    RemoteEngine,
    RemoteModel,
    log,
    open_remote,
    paused_folder,
)
from penstock.engines.servers.pauses import Recovery, RecoverySteps, ServerCall, read_record
from penstock.engines.servers.replies import ReplyReader
from penstock.engines.servers.server_weights import (
    ModelContents,
    PublishedWeights,
    ServedAdapter,
    WeightSender,
    adapter_roots,
    check_same_shape,
    exchange,
    read_vocabulary,
)
from penstock.engines.servers.settings import RemoteSection
from penstock.errors import ConfigError, EngineError, EngineRefused
from penstock.http.client import HttpClient, UpstreamError
from penstock.records import PlacedPicture, Sampling
from penstock.system.async_tools import finish_shielded

LLGUIDANCE = "%llguidance {}"
"""A first line that xgrammar refuses, so that the server's `auto` takes llguidance: xgrammar reads such grammars too since 0.2, and
leaves out what says where white space may be."""


class CompletionChoice(TypedDict, total=False):
    """What one event adds to the reply; only the fields that are read."""

    token_ids: list[int] | None
    logprobs: "CompletionLogprobs | None"
    prompt_token_ids: list[int] | None
    """In the first event: the prompt as the server saw it."""
    finish_reason: Literal["stop", "length"] | None


class CompletionLogprobs(TypedDict):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """By `token_id:` and the id, if those were asked for; the sampled token is among them."""


def request_body(model: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """Every setting is sent, because the server's defaults come from the model's generation config."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "logprobs": sampling.top_logprobs,
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
    }
    if sampling.grammar is not None:  # as a grammar also where a schema would do: the trainer replays what the server enforces
        body["structured_outputs"] = {"grammar": f"{LLGUIDANCE}\n{sampling.grammar.lark}"}
    if sampling.biased:
        bans, others = dict.fromkeys(sampling.banned_ids, -100), dict.fromkeys(sampling.only_ids, 100)
        body["logit_bias"] = {str(token_id): bias for token_id, bias in (others | bans).items()}
    if sampling.top_logprobs:
        body["return_tokens_as_token_ids"] = True
    return body if sampling.seed is None else body | {"seed": sampling.seed}


class VllmReader(ReplyReader):
    def read(self, event: dict[str, Any]) -> None:
        choices: list[CompletionChoice] = event["choices"]
        for choice in choices:
            self._read(choice)

    def _read(self, choice: CompletionChoice) -> None:
        if "token_ids" not in choice:
            raise UpstreamError("sent no token ids; its vLLM must know `return_token_ids`", kind="garbled")
        if choice.get("prompt_token_ids") not in (None, self._prompt):
            raise UpstreamError(
                "sampled after another prompt than it was given; is something between that rewrites it?", kind="garbled"
            )
        scores = choice.get("logprobs")
        self.add(choice["token_ids"] or [], scores["token_logprobs"] if scores else [], choice.get("finish_reason"))
        if scores and self.wanted:
            self.add_likely(
                [[(int(name.removeprefix("token_id:")), x) for name, x in one.items()] for one in scores["top_logprobs"]]
            )


def picture_request(model: str, prompt: list[int], sampling: Sampling, pictures: Sequence[SentPicture]) -> dict[str, Any]:
    """For the route that takes token ids with pictures. The server puts the tokens of each into the place of its one token."""
    around = ("model", "prompt", "stream", "return_token_ids")
    asked = replace(sampling, top_logprobs=0)  # that route reports them in another form
    settings = {name: value for name, value in request_body(model, prompt, asked).items() if name not in around}
    return {
        "model": model,
        "token_ids": collapsed(prompt, [picture.place for picture in pictures]),
        "content_parts": [{"type": "image_url", "url": picture.url} for picture in pictures],
        "sampling_params": settings | {"detokenize": False},
        "return_token_ids": True,
        "stream": True,
    }


def collapsed(prompt: Sequence[int], places: Sequence[PlacedPicture]) -> list[int]:
    """The prompt with one token for each picture; EngineRefused if the server would put one into another place."""
    ids, end = list[int](), 0
    for place in places:
        between = prompt[end : place.first]
        if place.token in between:
            raise EngineRefused(f"token {place.token} stands for a picture and lies before one where no picture is; leave it out")
        ids += [*between, place.token]
        end = place.first + place.size
    return [*ids, *prompt[end:]]


class VllmPictureReader(ReplyReader):
    """Of the route that takes pictures: the first event has the prompt that the server made, next to the choices."""

    _is_checked = False

    def read(self, event: dict[str, Any]) -> None:
        if not self._is_checked and event["prompt_token_ids"] != self._prompt:
            raise UpstreamError("put pictures into a prompt otherwise than when it was asked about each", kind="garbled")
        self._is_checked = True
        for choice in event["choices"]:
            scores = choice.get("logprobs")
            logprobs = [entry["logprob"] for entry in scores["content"]] if scores else []
            self.add(choice["token_ids"] or [], logprobs, choice.get("finish_reason"))


MIN_TEMPERATURE = 0.01
"""vLLM silently raises positive temperatures below this one."""


class VllmSection(RemoteSection):
    """`[engine]` for `name = "vllm"`."""

    weights: Literal["auto", "ipc", "nccl", "memory", "folder"] = "auto"
    """How new weights reach the servers: `ipc` (on the same GPU) and `nccl` (across GPUs) by vLLM's weight transfer, `memory` by a
    folder in /dev/shm, `folder` by one in the run's folder. `auto` takes the first that both ends can do; the last is the
    fallback of all."""
    sleep: bool = False
    """Whether the servers sleep while an update is computed, so that a learner on their GPU has their memory. They must be started
    with `--enable-sleep-mode`."""

    def preflight(self, model: str) -> None:
        VllmEngine.preflight(self, model)


OLDEST, NEWEST = (0, 22), (0, 32)
"""Versions that were tried."""
ADDED_IN = {"/weight_info": (0, 27), "/update_weight_version": (0, 27)}
"""Routes of development mode that older versions lack, for servers that hide `/openapi.json`."""
NEEDED = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/reset_prefix_cache")
DEV_MODE = (*NEEDED, *ADDED_IN, "/server_info", "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update")
LOAD_ADAPTER = "/v1/load_lora_adapter"
RENDER = "/v1/chat/completions/render"
PICTURE_REMEDY = "start vLLM 0.30 or later with --enable-scale-out"
RESET_TRIES = 5
OTHERS_PAUSE_S = 10.0
"""How long another program may keep a server paused before a run that wants to use it gives up."""
LEFT_LABEL = f"{LABEL_PREFIX}unnamed"
"""Of weights of which only this is known: a run has put them there."""


class VllmFeatures(NamedTuple):
    """What a vLLM server says about itself."""

    version: tuple[int, ...]
    routes: frozenset[str]
    """Those that matter here."""
    settings: dict[str, Any]
    """`/server_info`, which is there in development mode only."""
    takes_pictures: bool = False
    """Whether its route for token ids takes pictures with them, and reports the prompt that it made of both."""

    def setting(self, section: str, key: str) -> Any:
        return _table(_table(self.settings.get("vllm_config")).get(section)).get(key)

    @property
    def transfer_backend(self) -> str:
        """Which transfer of weights it was started with; empty for none, and for `ipc` without leave to read pickles."""
        backend: str = self.setting("weight_transfer_config", "backend") or ""
        env = _table(self.settings.get("vllm_env"))
        return "" if backend == "ipc" and not env.get("VLLM_ALLOW_INSECURE_SERIALIZATION") else backend


class NamedWeights(NamedTuple):
    """Our record of what a server holds that cannot name its weights."""

    label: str
    started: str
    """When the server was started; empty if it does not say."""


class VllmEngine(RemoteEngine):
    """A fleet of vLLM servers."""

    kind = "vLLM"
    path = "/v1/completions"
    picture_path = "/inference/v1/generate"
    pause_call = ServerCall("/pause?mode=keep", {}, "paused")
    resume_call = ServerCall("/resume", {}, "resumed")
    load_remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1, where the run's folder has the same path as here"

    adapter_remedy = (
        "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-loras 4 --max-lora-rank of train.rank or more, "
        "where the run's folder has the same path as here"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._features: dict[str, VllmFeatures] = {}
        self._named: dict[str, NamedWeights] = {}
        """By URL, for servers without `/weight_info`."""
        self._connected: dict[str, str] = {}
        """By URL, the start of the server that a transfer was set up with."""
        self._asleep: set[str] = set()
        """Servers that may be: a token that one samples now would end it."""
        self._roots: dict[str, str] = {}
        """The model that each server was started with, as its own path or name."""

    def body(self, prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
        return request_body(self._served.model, prompt, sampling)

    def reader(self, prompt: list[int], sampling: Sampling, server: EngineServer) -> VllmReader:
        return VllmReader(prompt, sampling, version=server.version, behaviour_known=self.behaviour_known(sampling))

    def picture_body(self, prompt: list[int], sampling: Sampling, pictures: Sequence[SentPicture]) -> dict[str, Any]:
        return picture_request(self._served.model, prompt, sampling, pictures)

    def picture_reader(self, prompt: list[int], sampling: Sampling, server: EngineServer) -> VllmPictureReader:
        return VllmPictureReader(prompt, sampling, version=server.version, behaviour_known=self.behaviour_known(sampling))

    async def render_picture(self, url: str) -> RenderedPicture:
        """See `PictureEngine`. No token is sampled."""
        state = RetryState(self.client.policy)
        while True:
            await self.client.wait_for_server()
            try:
                return await self._render_picture(url)
            except UpstreamError as error:
                if error.kind == "refused":
                    raise EngineRefused(str(error)) from error
                if (wait_s := state.wait_s(error, others=False)) is None:
                    raise EngineError(f"no server has read a picture: {error}") from error
                await asyncio.sleep(wait_s)

    async def _render_picture(self, url: str) -> RenderedPicture:
        up = [server.url for server in self.client.fleet.servers if server.up.is_set()]
        if not up:
            raise UpstreamError("none is up", kind="broken")
        for server in up:  # a request may go to any of them
            if not (await self.features(server)).takes_pictures:
                raise EngineRefused(f"{server} takes no pictures with token ids; {PICTURE_REMEDY}")
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        body = {"model": self._served.model, "messages": [message], "mm_payload": "none"}
        server = random.choice(up)
        return _rendered_picture(await self.client.http.request_json(server + RENDER, body), server)

    def check_sampling(self, sampling: Sampling) -> None:
        if 0.0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineRefused(f"temperature = {sampling.temperature}: vLLM takes 0 (greedy) or at least {MIN_TEMPERATURE}")

    def with_adapter(self, body: dict[str, Any], name: str) -> dict[str, Any]:
        return body | {"model": name}

    async def load_adapter(self, url: str, adapter: ServedAdapter) -> None:
        features = await self.features(url)
        if features.routes and LOAD_ADAPTER not in features.routes:
            raise UpstreamError(f"{url} has no {LOAD_ADAPTER}", kind="refused", status=404)
        if (replicas := features.setting("parallel_config", "data_parallel_size") or 1) > 1:
            text = f"an adapter that {url} loads reaches one of its {replicas} replicas only; start a server for each"
            raise UpstreamError(text, kind="refused", status=400)
        try:
            body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
            await self.client.http.request_bytes(url + LOAD_ADAPTER, body, limit_s=self._load_s)
        except UpstreamError as error:
            if error.status != 400 or adapter.name not in await self.listed_adapters(url):
                raise

    async def unload_adapter(self, url: str, name: str) -> None:
        await self.client.http.request_bytes(f"{url}/v1/unload_lora_adapter", {"lora_name": name}, limit_s=self._control_s)

    async def listed_adapters(self, url: str) -> dict[str, str]:
        return adapter_roots(await self.client.http.request_json(f"{url}/v1/models"), url)

    async def change_weights(self, url: str, wanted: PublishedWeights) -> None:
        if wanted.written is not None:
            with _missed(f"{wanted.folder} was not written in time"):
                await asyncio.wait_for(wanted.written.wait(), self._load_s)
        started = await self._start_time(url)
        await self.post(url, reload_call(str(wanted.folder)), limit_s=self._load_s)
        await self.finish_change(url, wanted, started)

    async def finish_change(self, url: str, wanted: PublishedWeights, started: str) -> None:
        """Drop caches of the old weights, and give the new ones their name."""
        for _ in range(RESET_TRIES):
            answer = await self.post(url, RESET)
            if not isinstance(answer, dict) or answer.get("success", True):  # before 0.26 it is empty
                break
        else:
            raise UpstreamError(f"{url} has kept what it computed with the weights before", kind="broken", status=200)
        if "/update_weight_version" in (await self.features(url)).routes:
            await self.post(url, name_call(wanted.label))
            return
        if started != (now := await self._start_time(url)):
            raise UpstreamError(f"{url} restarted while it loaded weights", kind="broken")
        self._named[url] = NamedWeights(wanted.label, now)

    def recovery_steps(self, url: str, before: PublishedWeights) -> RecoverySteps:
        if url in self._asleep:
            return [WAKE, [self.resume_call]]
        return reload_steps([str(before.folder), self._roots.get(url, "")], self._features.get(url))

    async def transfer(self, version: int, sender: WeightSender, folder: Path, written: asyncio.Event) -> None:
        """Like `load`, from the sender's memory to that of every server. `folder` holds the weights once `written` is set.

        A server that fails gets its weights before back, from their folder.
        """
        wanted = self._weights(version, folder)._replace(written=written)
        async with self._loading:
            if self._published is None:
                start = self._initial.folder
                await self._check_loadable(await asyncio.to_thread(check_same_shape, start, start, self.context_length))
            await self._publish(wanted, partial(self._receive, sender))

    async def _receive(self, sender: WeightSender, url: str, wanted: PublishedWeights) -> None:
        started = await self._start_time(url)
        if self._connected.get(url) != started:
            size = _field(await self.client.http.request_json(f"{url}/get_world_size"), "world_size", int, url)
            info, work = await asyncio.to_thread(sender.connect, url, size)
            init = ServerCall("/init_weight_transfer_engine", {"init_info": info}, "initialized")
            await exchange(self.post(url, init), work, self._load_s)
            self._connected[url] = started
        await self.post(url, START)
        try:
            info, work = await asyncio.to_thread(sender.send, url)
            update = ServerCall("/update_weights", {"update_info": info}, "updated")
            await exchange(self.post(url, update, limit_s=self._load_s), work, self._load_s)
        except BaseException:
            del self._connected[url]
            raise
        await self.post(url, FINISH, limit_s=self._load_s)
        await self.finish_change(url, wanted, started)

    @asynccontextmanager
    async def asleep(self) -> AsyncGenerator[None]:
        """Let all servers that are up sleep, and wake them on leaving. Requests wait, and running replies continue afterwards."""
        fleet, done = self.client.fleet, asyncio.Event()

        async def rest(server: EngineServer, settled: asyncio.Event) -> None:
            try:
                await fleet.switch(server, server.version, lambda: self._sleep(server.url, settled, done))
            except UpstreamError as error:
                log.warning("%s did not sleep or wake as asked: %s", server.url, error)
            finally:
                settled.set()

        resting = {server: asyncio.Event() for server in fleet.servers if server.up.is_set()}
        async with asyncio.TaskGroup() as group:
            for server, settled in resting.items():
                group.create_task(rest(server, settled))
            try:
                for settled in resting.values():
                    await settled.wait()
                yield
            finally:
                done.set()

    async def _sleep(self, url: str, settled: asyncio.Event, done: asyncio.Event) -> None:
        self._asleep.add(url)
        if not await self._paused_servers.add(url, self.recovery_steps(url, self._served_last)):
            self._asleep.discard(url)
            raise UpstreamError(f"{url} is being changed by another run on this machine", kind="busy", status=503)
        try:
            await self.post(url, SLEEP, limit_s=self._load_s)
            settled.set()
            await done.wait()
        finally:
            await finish_shielded(self._wake(url))

    async def _wake(self, url: str) -> None:
        await self._bring_back(Recovery(url, self.recovery_steps(url, self._served_last), self._key))
        if url in self._paused_servers:
            raise UpstreamError(f"{url} could not be woken", kind="broken")
        self._asleep.discard(url)

    @asynccontextmanager
    async def paused(self, url: str) -> AsyncGenerator[None]:
        if url in self._asleep:
            await self._wake(url)
        async with super().paused(url):
            yield

    async def refuse_sleepless(self) -> None:
        """ConfigError if a server cannot sleep."""
        for server in self.client.fleet.servers:
            if server.up.is_set() and not (await self.features(server.url)).setting("model_config", "enable_sleep_mode"):
                raise ConfigError(
                    f"engine.sleep: {server.url} cannot sleep; start it with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"
                )

    async def transfer_backend(self) -> str:
        """The `--weight-transfer-config` of all servers that are up; empty if they differ or have none that can be used."""
        up = [server.url for server in self.client.fleet.servers if server.up.is_set()]
        try:
            found = {(await self.features(url)).transfer_backend for url in up}
        except UpstreamError:
            return ""
        return found.pop() if len(found) == 1 else ""

    async def load_obstacle(self, url: str, model: ModelContents) -> str:
        features = await self.features(url, renew=True)
        if missing := [route for route in NEEDED if route not in features.routes]:
            return f"it has no {missing[0]}; {self.load_remedy}"
        size, served = model.vocabulary, (await find_model(self.client.http, url, self._name)).vocabulary
        if size and served and size != served:
            return f"its model has {served} tokens and not {size}; start it with the model of the run"
        if features.setting("device_config", "device") == "cpu" and model.config.get("tie_word_embeddings"):
            return (
                "on a CPU vLLM keeps a packed copy of an output layer that is tied to the embeddings, and does not renew it; "
                "use a GPU, or a model folder whose `lm_head.weight` is its own (`tie_word_embeddings`: false)"
            )
        return ""

    async def features(self, url: str, *, renew: bool = False) -> VllmFeatures:
        """What the server says about itself; asked again after a restart."""
        if renew or url not in self._features:
            self._roots[url] = (await find_model(self.client.http, url, self._name)).root
            self._features[url] = await read_features(self.client.http, url)
        return self._features[url]

    async def weights_label(self, url: str) -> str:
        if "/weight_info" in (await self.features(url)).routes:
            answer = await self.client.http.request_json(f"{url}/weight_info")
            return _field(answer, "weight_version", str, url)
        named, started = self._named.get(url), await self._start_time(url)
        if named is not None and named.started == started:
            return named.label
        is_left = started and started == read_record(paused_folder(), url).changed
        return LEFT_LABEL if is_left else f"those of its start at {started or 'some time'}"

    async def server_start(self, url: str) -> str:
        return "" if "/weight_info" in (await self.features(url)).routes else await self._start_time(url)

    async def _check_server(self, server: EngineServer) -> None:
        self._features.pop(server.url, None)  # it may be another version now
        named = self._named.get(server.url)
        if named is not None and not named.started:
            del self._named[server.url]  # it was away, and may have been restarted
        if server.url in self._asleep:
            await self._wake(server.url)
        await super()._check_server(server)

    async def _start_time(self, url: str) -> str:
        """When the server's process was started, as `/metrics` says; empty if it does not."""
        with suppress(UpstreamError):
            text = await self.client.http.request_bytes(f"{url}/metrics")
            found = re.search(rb"^process_start_time_seconds\s+(\S+)", text, re.MULTILINE)
            return found[1].decode() if found else ""
        await self.client.http.request_bytes(f"{url}/health")  # is it gone, or only without metrics?
        return ""

    @classmethod
    async def inspect(cls, http: HttpClient, url: str, name: str) -> RemoteModel:
        await http.request_bytes(f"{url}/health")
        model = await find_model(http, url, name)
        features = await read_features(http, url)
        await _until_resumed(http, url, features, model.root)
        mode = features.setting("model_config", "logprobs_mode")
        processed = mode == "processed_logprobs" if mode else await _is_processed(http, url, model.name)
        return RemoteModel(model.name, model.context_length, processed, vocabulary=model.vocabulary)


START = ServerCall("/start_weight_update", {}, "started")
FINISH = ServerCall("/finish_weight_update", {}, "finished")
SLEEP = ServerCall("/sleep?level=1", {})
WAKE = [ServerCall("/wake_up", {}, None), ServerCall("/is_sleeping", None, "false")]
RESET = ServerCall("/reset_prefix_cache?reset_running_requests=true", {})


def reload_call(folder: str) -> ServerCall:
    return ServerCall("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}, "results")


def reload_steps(folders: Sequence[str], features: VllmFeatures | None) -> RecoverySteps:
    """What makes a paused server serve again, with the weights of the first of these folders that it can read."""
    reload = [reload_call(folder) for folder in folders if folder]
    # Twice: after a load that broke off in the middle of a layer, the next one fails too (seen with 0.32).
    steps = [reload, reload, [RESET], [VllmEngine.resume_call]]
    if features is not None and features.transfer_backend:
        steps.insert(0, [FINISH])  # refused where no transfer is under way
    if features is not None and "/update_weight_version" in features.routes:
        steps.insert(-1, [name_call(LEFT_LABEL)])  # it may have been given the new weights' name already
    return steps


def name_call(label: str) -> ServerCall:
    return ServerCall("/update_weight_version", {"new_version": label}, label)


def open_engine(
    folder: Path, *, name: str, section: VllmSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> VllmEngine:
    """See `open_remote`. `seed` and `decode` are unused: servers seed themselves, and the gateway looks for stop strings."""
    return open_remote(VllmEngine, folder, name=name, section=section)


# Questions


class ListedModel(NamedTuple):
    """An entry of `/v1/models`."""

    name: str
    context_length: int
    root: str
    """The folder or repository that the server was started with."""
    vocabulary: int
    """0 if that folder is not on this machine."""


async def find_model(http: HttpClient, url: str, name: str) -> ListedModel:
    """The model of this name, else the only one."""
    listed = await http.request_json(f"{url}/v1/models")
    try:
        models = {str(entry["id"]): entry for entry in listed["data"] if not entry.get("parent")}
        chosen = name if name in models else next(iter(models)) if len(models) == 1 else None
        if chosen is None:
            raise UpstreamError(f"{url} serves {', '.join(models) or 'nothing'}, and not {name}", kind="refused")
        context_length, root = int(models[chosen]["max_model_len"]), str(models[chosen].get("root") or "")
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise UpstreamError(f"{url}/v1/models does not say what is served; is it a vLLM server?", kind="garbled") from cause
    return ListedModel(chosen, context_length, root, read_vocabulary(Path(root)) if root else 0)


async def read_features(http: HttpClient, url: str) -> VllmFeatures:
    version = _parse_version(_field(await http.request_json(f"{url}/version"), "version", str, url))
    if version and not OLDEST <= version[:2] <= NEWEST:
        found = ".".join(map(str, version))
        log.warning("%s is vLLM %s; versions from %d.%d to %d.%d were tried", url, found, *OLDEST, *NEWEST)
    settings = await _optional(http, f"{url}/server_info?config_format=json")
    described = await _optional(http, f"{url}/openapi.json")
    if described is not None:
        routes = frozenset(cast("dict[str, Any]", _field(described, "paths", dict, url)))
    elif settings is None:  # no development mode
        routes = frozenset[str]()
    else:
        routes = frozenset(route for route in DEV_MODE if version >= ADDED_IN.get(route, ()))
    return VllmFeatures(version, routes, _table(settings), RENDER in routes and _takes_pictures(described))


def _takes_pictures(described: Any) -> bool:
    """By the fields in what `/openapi.json` says of the route: `content_parts` came with 0.28, the other with 0.30."""
    request = _table(_table(_table(_table(described).get("components")).get("schemas")).get("GenerateRequest"))
    return {"content_parts", "return_token_ids"} <= _table(request.get("properties")).keys()


def _rendered_picture(answer: Any, url: str) -> RenderedPicture:
    try:
        [place] = answer["features"]["mm_placeholders"]["image"]
        return RenderedPicture(tuple(answer["token_ids"]), int(place["offset"]), int(place["length"]))
    except (KeyError, TypeError, ValueError) as cause:
        raise UpstreamError(f"{url}{RENDER} does not say where a picture lies", kind="refused") from cause


@contextmanager
def _missed(text: str) -> Generator[None]:
    try:
        yield
    except TimeoutError as cause:
        raise UpstreamError(text, kind="broken", status=504) from cause


async def _optional(http: HttpClient, url: str) -> Any:
    """The answer of a route that a server may lack; None if it does."""
    try:
        return await http.request_json(url, limit_s=CONTROL_S)
    except UpstreamError as error:
        if error.status not in (403, 404, 405, 501):
            raise
        return None


F = TypeVar("F")


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _field(answer: Any, key: str, kind: type[F], url: str) -> F:
    value = _table(answer).get(key)
    if not isinstance(value, kind):
        raise UpstreamError(f"{url} gave an answer without {key!r}; is it a vLLM server?", kind="garbled")
    return value


def _parse_version(text: Any) -> tuple[int, ...]:
    """The numbers of a release; empty for a build without them."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(text))
    return tuple(map(int, found.groups())) if found else ()


async def _until_resumed(http: HttpClient, url: str, features: VllmFeatures, root: str) -> None:
    """Wait for a server that another program has paused. One with weights of an earlier run of ours is resumed.

    What it holds may be incomplete, so it gets the model that it was started with.
    """
    if "/is_paused" not in features.routes:
        return
    label = None
    for _ in range(max(1, round(OTHERS_PAUSE_S))):
        if not _field(await http.request_json(f"{url}/is_paused"), "is_paused", bool, url):
            return
        if label is None and "/weight_info" in features.routes:
            label = _field(await http.request_json(f"{url}/weight_info"), "weight_version", str, url)
        await asyncio.sleep(OTHERS_PAUSE_S / 10)
    if label is None or not label.startswith(LABEL_PREFIX):
        raise UpstreamError(
            f"{url} is paused, and not by a run on this machine; if nobody changes its weights, `curl -X POST {url}/resume`",
            kind="broken",
        )
    if not await asyncio.to_thread(Recovery(url, reload_steps([root], features), http.key).run):
        raise UpstreamError(f"{url} was left paused by an earlier run and cannot be resumed; restart it", kind="broken")
    log.warning("%s was left paused with the weights of an earlier run; it was resumed", url)


async def _is_processed(http: HttpClient, url: str, model: str) -> bool:
    """Whether log-probabilities are those after truncation: with top_k = 1 every token must have 0. Every model has token 0."""
    body = request_body(model, [0], Sampling(max_tokens=4, top_k=1)) | {"stream": False}
    answer = await http.request_json(url + VllmEngine.path, body)
    try:
        logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return max(abs(x) for x in logprobs) < 1e-6
    except (KeyError, IndexError, TypeError, ValueError) as cause:
        raise UpstreamError(f"{url}{VllmEngine.path} gives no log-probabilities; is it a vLLM server?", kind="garbled") from cause
