"""A vLLM server that is none: real HTTP on a free port, made-up tokens, and a script of what goes wrong.

It plays versions 0.22 to 0.32, with routes and answers as `tests/vllm/record.py` wrote them down from real servers, and as the
sources of the versions between them have them. As a real one it does not survive a token outside of its vocabulary, nor one that it
samples after weights failed to load.

async with FakeVllm([Act(status=429), Act(cut_after=3)]) as server, engine_over(server) as engine:
    ...  # the first request is refused, the second breaks off after three events, all further ones are served

Each act is for one request to `/v1/completions`, in their order; later requests are served well.
"""

import asyncio
import json
import random
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from penstock.engines.retry import RetryPolicy
from penstock.engines.servers.base import RemoteModel
from penstock.engines.servers.server_weights import TransferRound
from penstock.engines.servers.vllm import VllmEngine, VllmSection, open_engine
from penstock.http.client import RequestTimeouts

CONTEXT = 4096
MODEL = "made-up"
QUICK = RetryPolicy(first_wait_s=0.0, recheck_s=0.0)
"""Waits for nothing."""

Edit = Callable[[list[bytes]], list[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """How one request is answered."""

    status: int = 200
    words: str = "made-up trouble"
    """Of the error, where `status` is one."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    edit: Edit = list
    """What is done to the events before they are sent; one token an event, `[DONE]` last."""
    reset: bool = False
    """Reset the connection before a single byte."""
    cut_after: int | None = None
    """Reset the connection after so many events."""
    end_after: int | None = None
    """End the answer in good order after so many events."""
    stall_after: int | None = None
    """After so many events wait for `release`."""
    split: int | None = None
    """Send so many bytes at a time."""


VERSIONS = ("0.22.0", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
ROUTES = ("/health", "/metrics", "/tokenize", "/v1/completions", "/v1/models", "/version")
DEV_ROUTES = (
    "/collective_rpc", "/finish_weight_update", "/get_world_size", "/init_weight_transfer_engine", "/is_paused", "/is_sleeping",
    "/pause", "/reset_prefix_cache", "/resume", "/server_info", "/sleep", "/start_weight_update", "/update_weights", "/wake_up",
)  # fmt: skip
NAMING_ROUTES = "/update_weight_version", "/weight_info"
CHANGES = (
    "/collective_rpc", "/finish_weight_update", "/init_weight_transfer_engine", "/pause", "/reset_prefix_cache", "/resume",
    "/sleep", "/start_weight_update", "/update_weights", "/update_weight_version", "/wake_up",
)  # fmt: skip
ADAPTER_ROUTES = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PICTURE_ROUTES = "/inference/v1/generate", "/v1/chat/completions/render"
PICTURES = json.loads((Path(__file__).parents[1] / "vllm" / "recorded" / "0.32.0-pictures.json").read_text())
"""What a real server with the model of `tiny_vision` was asked about pictures, and its answers."""
MIXED = 99
"""What it holds where only a part of the weights has come."""
STARTS = count(1_794_844_527)


class FakeVllm:
    """The server. `processed` is its `--logprobs-mode`; one that is `trainable` runs in vLLM's development mode."""

    def __init__(
        self,
        acts: Iterable[Act] = (),
        *,
        processed: bool = True,
        context: int = CONTEXT,
        key: str = "",
        trainable: bool = True,
        version: str = "0.32.0",
    ) -> None:
        self.acts = deque(acts)
        self.trainable = trainable
        self.version = version
        self.root: str | None = None
        """The folder that it was started with."""
        self.documented = True
        """Whether it has `/openapi.json`."""
        self.timed = True
        """Whether its metrics say when it was started."""
        self.takes_adapters = False
        """Whether it was started with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
        self.replicas = 1
        """Its --data-parallel-size."""
        self.sees_pictures = False
        """Whether its model does, and it was started with `--enable-scale-out`. It knows the pictures that were recorded."""
        self.backend: str | None = None
        """Of its `--weight-transfer-config`."""
        self.sleeps = False
        """Its --enable-sleep-mode."""
        self.insecure = False
        """VLLM_ALLOW_INSECURE_SERIALIZATION."""
        self.cut: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None
        """Called with each request first; what it returns is the answer."""
        self.device, self.vocabulary = "cuda", 100_000
        self.sent: dict[str, Any] = {}
        """What the last transfer brought."""
        self.refuses = False
        """Whether it fails to read weights."""
        self.fails_once = False
        """Whether loading or receiving weights breaks off the next time, when some of them have come."""
        self.unseen = ""
        """A folder that it does not see."""
        self.calls: list[str] = []
        """What it was asked to do about its weights."""
        self.confesses = False
        """Whether every log-probability says what it holds: -(number + 1), the number being the last part of the folder's name."""
        self.processed, self.context, self.key = processed, context, key
        self.otherwise = Act()
        """For requests after the last act."""
        self.healthy = True
        self.requests: list[dict[str, Any]] = []
        """The bodies of all streamed requests."""
        self.running = 0
        self.gone = asyncio.Event()
        """Set when a caller hung up before its reply was complete."""
        self.stalled = asyncio.Event()
        """Set when a reply stalls."""
        self.asked = asyncio.Event()
        """Set when the health of the server is asked for."""
        self._released = asyncio.Event()
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.connections: set[asyncio.Transport] = set()
        """All that streamed requests came over."""
        self._port = 0
        self.forget()

    def forget(self) -> None:
        """What a restart does to it."""
        self.label, self.held = "default", 0
        self.adapters: dict[str, str] = {}
        """Folders of adapters by name."""
        self.crashed = False
        """Whether a request has brought it down: it answers 500 from then on."""
        self.broken = False
        """Whether weights have failed to load: the next token crashes it."""
        self.half_loaded = False
        """Whether loading broke off in the middle of a layer: the next load meets what is left of it, and fails too."""
        self.updating = self.asleep = False
        self.started = next(STARTS)
        self._running = asyncio.Event()
        self._running.set()

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    @property
    def names_weights(self) -> bool:
        return self.version >= "0.27"

    @property
    def routes(self) -> list[str]:
        dev = DEV_ROUTES + (NAMING_ROUTES if self.names_weights else ())
        seen = PICTURE_ROUTES if self.sees_pictures else ()
        return sorted(ROUTES + seen + (dev if self.trainable else ()) + (ADAPTER_ROUTES if self.takes_adapters else ()))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        app = web.Application(client_max_size=1 << 26, middlewares=[self._cutting])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        if self.documented:
            app.router.add_get("/openapi.json", self._openapi)
        if self.takes_adapters:
            app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        if self.sees_pictures:
            app.router.add_post(PICTURE_ROUTES[0], self._generate)
            app.router.add_post(PICTURE_ROUTES[1], self._render)
        if self.trainable:
            for path in set(self.routes) & {*CHANGES}:
                app.router.add_post(path, self._change)
            if self.names_weights:
                app.router.add_get("/weight_info", self._weight_info)
            app.router.add_get("/server_info", self._server_info)
            app.router.add_get("/is_paused", self._is_paused)
            app.router.add_get("/is_sleeping", self._is_sleeping)
            app.router.add_get("/get_world_size", self._world_size)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Reset every connection and refuse new ones."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for transport in self.connections:
                transport.abort()
            self.connections.clear()
            await runner.cleanup()

    def release(self) -> None:
        """Let stalled replies continue, and stall none from now on."""
        self._released.set()

    def pause(self) -> None:
        self._running.clear()

    async def until_resumed(self) -> None:
        """Wait until nobody keeps it paused."""
        await self._running.wait()

    async def until_running(self, count: int) -> None:
        """Wait until so many requests are being answered."""
        while self.running != count:
            self._changed.clear()
            await self._changed.wait()

    @web.middleware
    async def _cutting(self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        answer = await self.cut(request) if self.cut is not None else None
        return await handler(request) if answer is None else answer

    async def _health(self, request: web.Request) -> web.Response:
        self.asked.set()
        return web.Response(status=200 if self.healthy and not self.crashed else 503)

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": self.root, "parent": None}
        base = entry | {"max_model_len": self.context}
        adapters = [entry | {"id": name, "root": root, "parent": MODEL} for name, root in self.adapters.items()]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        self.calls.append(f"load {name}")
        if name in self.adapters:
            return trouble(400, f"The lora adapter '{name}' has already been loaded.")
        if self.refuses or not (Path(path) / "adapter_model.safetensors").exists():
            return trouble(404, f"Loading lora {name} failed: No adapter found for {path}")
        self.adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.calls.append(f"unload {name}")
        if self.adapters.pop(name, None) is None:
            return trouble(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {self.started:.11e}"] if self.timed else []
        return web.Response(text="\n".join([*lines, "# TYPE vllm:num_requests_running gauge", ""]))

    async def _openapi(self, request: web.Request) -> web.Response:
        added = {"content_parts": "0.28", "return_token_ids": "0.30"}
        known = {field: {} for field in PICTURES["fields"]["answer"] if self.version >= added.get(field, "")}
        schemas = {"GenerateRequest": {"properties": known}} if self.sees_pictures else {}
        paths = {route: {} for route in self.routes}
        return web.json_response({"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}})

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        for entry in PICTURES.values():
            if entry.get("body", {}).get("messages") == body["messages"]:
                return web.json_response(entry["answer"], status=entry["status"])
        return trouble(400, "Failed to load image: cannot identify image file <_io.BytesIO object>")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Token ids with pictures; the reply is that of `/v1/completions` to the prompt that is made of both, in another form."""
        body = await request.json()
        self.requests.append(body)
        prompt, left = list[int](), [picture_tokens(part["url"]) for part in body["content_parts"]]
        if None in left:
            return trouble(400, "Failed to load image: cannot identify image file <_io.BytesIO object>")
        for token_id in body["token_ids"]:
            prompt += left.pop(0) or [] if left and token_id == PICTURE_MARK else [token_id]
        if left:
            return trouble(500, "Failed to apply prompt replacement for mm_items['image'][1]")
        settings = {"top_p": 1.0, "top_k": 0, "stop_token_ids": [], **body["sampling_params"]}
        events = self._events({**settings, "prompt": prompt})
        return await self._play(
            request, self.acts.popleft() if self.acts else self.otherwise, list(map(as_tokens, events)), self.held
        )

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _server_info(self, request: web.Request) -> web.Response:
        config = {
            "model_config": {
                "logprobs_mode": "processed_logprobs" if self.processed else "raw_logprobs",
                "dtype": "torch.bfloat16",
                "enable_sleep_mode": self.sleeps,
            },
            "device_config": {"device": self.device},
            "cache_config": {"gpu_memory_utilization": 0.3},
            "parallel_config": {"data_parallel_size": self.replicas},
            "weight_transfer_config": {"backend": self.backend} if self.backend else None,
        }
        env = {"VLLM_SERVER_DEV_MODE": True, "VLLM_ALLOW_INSECURE_SERIALIZATION": self.insecure}
        return web.json_response({"vllm_config": config, "vllm_env": env, "system_env": {}})

    async def _change(self, request: web.Request) -> web.Response:
        call, text = request.path[1:], await request.text()
        body = json.loads(text) if text else {}
        self.calls.append(call)
        if self.crashed:
            return trouble(500, "EngineCore encountered an issue")
        match call:
            case "pause":
                assert request.query["mode"] == "keep"
                self._running.clear()
                return web.json_response({"status": "paused"})
            case "resume":
                self.broken |= self.asleep  # its weights are not on the GPU
                self._running.set()
                return web.json_response({"status": "resumed"})
            case "reset_prefix_cache":
                return web.json_response({"success": True}) if self.version >= "0.26" else web.Response()
            case "update_weight_version":
                self.label = body["new_version"]
                return web.json_response({"success": True, "new_version": self.label})
            case "collective_rpc":
                return self._reload(body["kwargs"]["weights_path"])
            case "sleep" | "wake_up":
                self.asleep = call == "sleep"
                if self.asleep:
                    self._running.clear()
                else:
                    self._running.set()
                return web.Response()
            case _:
                return self.transfer(call, body)

    def _reload(self, path: str) -> web.Response:
        self.broken = (
            self.refuses
            or self.fails_once
            or self.half_loaded
            or bool(self.unseen and path.startswith(self.unseen))
            or not (Path(path) / "model.safetensors").exists()
        )
        self.half_loaded, self.fails_once = self.fails_once, False
        if self.broken:
            return trouble(500, "Call to collective_rpc method failed: Worker failed with error 'made-up trouble'")
        self.held = number_of(path)
        return web.json_response({"results": [None]})

    def transfer(self, call: str, body: dict[str, Any]) -> web.Response:
        """The weight-transfer API. Weights that are sent carry their number as the first of their names."""
        if self.backend is None:
            return trouble(500, "Call to collective_rpc method failed: Weight transfer not configured.")
        match call:
            case "init_weight_transfer_engine":
                assert isinstance(body["init_info"], dict)
                return web.json_response({"message": "Weight transfer initialized"})
            case "start_weight_update":
                if self.updating:
                    return trouble(500, "start_weight_update called while a weight update is already active.")
                self.updating = self.broken = True
                return web.json_response({"message": "Weight update started"})
            case "update_weights":
                if not self.updating or self.refuses or self.fails_once:
                    self.half_loaded, self.fails_once = self.updating and self.fails_once, False
                    self.updating = self.updating and self.version < "0.27"
                    return trouble(500, "Call to collective_rpc method failed: IPC handle not found for GPU UUID GPU-x.")
                self.sent = body["update_info"]
                return web.json_response({"message": "Weights updated"})
            case _:
                if not self.updating:
                    return trouble(500, "finish_weight_update called without a matching start_weight_update.")
                self.updating = False
                if self.half_loaded:
                    self.half_loaded, self.held = False, MIXED
                elif self.sent:
                    self.broken, self.held, self.sent = False, int(self.sent["names"][0]), {}
                return web.json_response({"message": "Weight update finished"})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return trouble(401, f"wrong key, got {request.headers.get('authorization')}")
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return trouble(400, f"This model's maximum context length is {self.context} tokens. However, you asked for more.")
        if body["model"] not in (MODEL, *self.adapters):
            return trouble(404, f"The model `{body['model']}` does not exist.")
        folder = self.adapters.get(body["model"])  # read again for each request, as a server does that has set it aside
        if folder is not None and not (Path(folder) / "adapter_model.safetensors").exists():
            self.crashed = True
        self.crashed = self.crashed or max(body["prompt"]) >= self.vocabulary or (self.broken and not self.paused)
        if self.crashed:
            return trouble(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        events = self._events(body)
        if not body["stream"]:
            await self._running.wait()
            return web.json_response({"choices": [json.loads(events[0][6:])["choices"][0]]})
        self.requests.append(body)
        act = self.acts.popleft() if self.acts else self.otherwise
        assert request.transport is not None
        self.connections.add(request.transport)
        self._count(1)
        try:
            return await self._play(request, act, events, self.held if folder is None else number_of(folder))
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone.set()
            raise
        finally:
            self._count(-1)

    async def _play(self, request: web.Request, act: Act, events: list[bytes], held: int) -> web.StreamResponse:
        assert request.transport is not None
        if act.reset:
            request.transport.abort()
            return web.Response()
        if act.status != 200:
            return trouble(act.status, act.words, act.headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for place, event in enumerate([*act.edit(events), None]):
            if act.stall_after == place:
                self.stalled.set()
                await self._released.wait()
            if act.cut_after == place:
                request.transport.abort()
            if act.end_after == place or event is None:
                break
            await self._running.wait()
            self.crashed = self.crashed or self.broken
            held = held if self.adapters else self.held
            event = self._confessing(event, held) if self.confesses else event
            for start in range(0, len(event), act.split or len(event)):
                await response.write(event[start : start + (act.split or len(event))])
                await asyncio.sleep(0)
        await response.write_eof()
        return response

    def _confessing(self, event: bytes, held: int) -> bytes:
        if event.startswith(b"data: [DONE]"):
            return event
        return edited(0, logprobs={"token_logprobs": [-float(held + 1)]})([event])[0]

    def _count(self, change: int) -> None:
        self.running += change
        self._changed.set()

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        """The whole reply to a request."""
        prompt, most = body["prompt"], body["max_tokens"]
        rng = random.Random(str(body.get("seed", len(self.requests))) + str(prompt))
        ids = [rng.randrange(1, 58) for _ in range(most)]
        stops = [place for place, token_id in enumerate(ids) if token_id in body["stop_token_ids"]]
        finish = "stop" if stops else "length"
        ids = ids[: stops[0] + 1] if stops else ids
        chunks = [self._chunk(token_id, place, body) for place, token_id in enumerate(ids)]
        chunks[0]["prompt_token_ids"] = prompt
        chunks[-1]["finish_reason"] = finish
        return [event({"choices": [chunk]}) for chunk in chunks] + [b"data: [DONE]\n\n"]

    def _chunk(self, token_id: int, place: int, body: dict[str, Any]) -> dict[str, Any]:
        full = -((token_id * 7919 + place * 104_729) % 4096 + 1) / 1024
        tempered = body["temperature"] not in (0.0, 1.0) or body["top_p"] < 1.0
        seen = full if not self.processed else 0.0 if body["top_k"] == 1 else full / 2 if tempered else full
        logprobs = {"token_logprobs": [seen], "tokens": ["é"], "text_offset": [place], "top_logprobs": [{"é": seen}]}
        return {"index": 0, "text": "é", "logprobs": logprobs, "finish_reason": None, "token_ids": [token_id]}


class NumberedSender:
    """Sends weights whose first name is their number, as the double reads them."""

    backend = "ipc"

    def __init__(self) -> None:
        self.number = 0
        self.connected: list[int] = []
        self.work: Any = None

    def connect(self, url: str, world_size: int) -> TransferRound:
        self.connected.append(world_size)
        return TransferRound({})

    def send(self, url: str) -> TransferRound:
        return TransferRound({"names": [str(self.number)], "dtype_names": ["float32"], "shapes": [[1]]}, self.work)


@asynccontextmanager
async def engine_over(
    *servers: FakeVllm,
    policy: RetryPolicy = QUICK,
    timeouts: RequestTimeouts | None = None,
    key: str = "",
    folder: Path = Path(),
    **options: float,
) -> AsyncIterator[VllmEngine]:
    """An engine whose servers are believed to be well."""
    first = servers[0]
    served = RemoteModel(MODEL, first.context, first.processed, vocabulary=first.vocabulary)
    urls = [server.url for server in servers]
    engine = VllmEngine(urls, name=MODEL, served=served, folder=folder, timeouts=timeouts, policy=policy, key=key, **options)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def opened(urls: Sequence[str], folder: Path | None = None, **fields: Any) -> AsyncIterator[VllmEngine]:
    """An engine opened as a run opens it."""
    section = VllmSection(name="vllm", url=tuple(urls), **fields)
    with tempfile.TemporaryDirectory() as empty:
        (Path(empty) / "config.json").write_text(json.dumps({"vocab_size": 60}))
        engine = await asyncio.to_thread(open_engine, folder or Path(empty), name=MODEL, section=section, seed=0)
        try:
            yield engine
        finally:
            await engine.close()


PICTURE_MARK = PICTURES["generate with a mark after them"]["body"]["token_ids"][-1]
"""The token in whose place a picture's are put."""


def picture_tokens(url: str) -> list[int] | None:
    """The tokens of a picture; None for one that the server cannot read."""
    for entry in PICTURES.values():
        content = entry["body"]["messages"][0]["content"] if "messages" in entry.get("body", {}) else []
        if [part["image_url"]["url"] for part in content] == [url] and entry["status"] == 200:
            [place] = entry["answer"]["features"]["mm_placeholders"]["image"]
            return entry["answer"]["token_ids"][place["offset"] : place["offset"] + place["length"]]
    return None


def as_tokens(completion: bytes) -> bytes:
    """An event of `/v1/completions` as `/inference/v1/generate` sends it."""
    if completion.startswith(b"data: [DONE]"):
        return completion
    [choice] = json.loads(completion[6:])["choices"]
    pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    content = [{"token_id": token_id, "logprob": logprob, "rank": 1, "top_logprobs": []} for token_id, logprob in pairs]
    reported = {"prompt_token_ids": choice["prompt_token_ids"]} if "prompt_token_ids" in choice else {}
    kept = {key: choice[key] for key in ("index", "finish_reason", "token_ids")}
    return event(
        {"request_id": "generate-tokens-1", "usage": None, **reported, "choices": [kept | {"logprobs": {"content": content}}]}
    )


def event(payload: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def number_of(path: str) -> int:
    """What a folder's weights are known by: the number that it is called, 0 for any other name."""
    name = Path(path).name
    return int(name) if name.isdecimal() else 0


def trouble(status: int, words: str, headers: dict[str, str] | None = None) -> web.Response:
    """An error as vLLM words it."""
    return web.json_response({"error": {"message": words, "type": "trouble", "code": status}}, status=status, headers=headers)


def replaced(place: int, by: bytes) -> Edit:
    """An edit that puts `by` in place of one event."""
    return lambda events: [*events[:place], by, *events[place + 1 :]]


def edited(place: int, **fields: Any) -> Edit:
    """An edit that changes fields of one event's choice."""

    def edit(events: list[bytes]) -> list[bytes]:
        payload = json.loads(events[place][6:])
        payload["choices"][0].update(fields)
        return [*events[:place], event(payload), *events[place + 1 :]]

    return edit
