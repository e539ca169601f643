"""An SGLang server that is none: real HTTP on a free port, made-up tokens, and the routes as SGLang documents them.

`/generate` streams events `{"text", "output_ids", "meta_info"}`, and by default every event holds
all tokens so far; `incremental` is its `--incremental-streaming-output`. `meta_info.output_token_logprobs` has (log-probability,
id, text or null) of each token, `weight_version` what the server holds, `finish_reason` an object with a `type`.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from penstock.engines.servers.sglang import SglangEngine, SglangSection, open_engine

CONTEXT = 4096
MODEL = "made-up"


class SglangDouble:
    """The server. `original` is its SGLANG_RETURN_ORIGINAL_LOGPROB, `deterministic` its --enable-deterministic-inference."""

    def __init__(self, *, incremental: bool = False, original: bool = False, deterministic: bool = True) -> None:
        self.incremental, self.original, self.deterministic = incremental, original, deterministic
        self.refuses = False
        self.confesses = False
        """Whether every log-probability says what it holds: -(number + 1), the number being the last part of the folder's name."""
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.abort = asyncio.Event()
        """Set when a request is aborted."""
        self.running = 0
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.forget()

    def forget(self) -> None:
        """What a restart does to it."""
        self.label, self.held = "default", 0
        self.adapters: dict[str, str] = {}
        """Folders of adapters by name."""
        self._going = asyncio.Event()
        self._going.set()

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
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/get_server_info", self._server_info)
        app.router.add_get("/get_model_info", self._model_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        for path in ("pause_generation", "update_weights_from_disk", "continue_generation"):
            app.router.add_post(f"/{path}", self._change)
        app.router.add_post("/load_lora_adapter", self._load_adapter)
        app.router.add_post("/unload_lora_adapter", self._unload_adapter)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """End it, and refuse new connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        adapters = [{"id": name, "root": root, "parent": MODEL} for name, root in self.adapters.items()]
        return web.json_response({"object": "list", "data": [{"id": MODEL, "root": MODEL, "max_model_len": CONTEXT}, *adapters]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(f"load {body['lora_name']}")
        if self.refuses:
            return web.json_response({"success": False, "error_message": "rank 16 exceeds 8", "loaded_adapters": {}}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": self.adapters})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.calls.append(f"unload {name}")
        self.adapters.pop(name, None)
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": self.adapters})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": MODEL, "enable_deterministic_inference": self.deterministic})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": MODEL, "is_generation": True, "weight_version": self.label})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        self.abort.set()
        return web.Response()

    async def _change(self, request: web.Request) -> web.Response:
        call, body = request.path[1:], await request.json()
        self.calls.append(call)
        if call == "pause_generation":
            assert body["mode"] == "retract"
            self._going.clear()
        elif call == "continue_generation":
            self._going.set()
        elif self.refuses:
            content = {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            return web.json_response(content, status=400)
        else:
            assert body["flush_cache"]
            self.held, self.label = int(Path(body["model_path"]).name), body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens, adapter = self._tokens(body), body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            text = f"The following requested LoRA adapters are not loaded: {{'{adapter}'}}"
            return web.json_response({"error": {"message": text}}, status=400)
        held = None if adapter is None else int(Path(self.adapters[adapter]).name)
        if not body["stream"]:
            return web.json_response(self._event(body, tokens, len(tokens), 0))
        self.requests.append(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            for count in range(1, len(tokens) + 1):
                await self._going.wait()
                if self.confesses:
                    tokens[count - 1] = (-float((self.held if held is None else held) + 1), tokens[count - 1][1], None)
                event = self._event(body, tokens, count, count - 1 if self.incremental else 0)
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                await asyncio.sleep(0)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            self.running -= 1
        return response

    def _event(self, body: dict[str, Any], tokens: list[tuple[float, int, None]], count: int, start: int) -> dict[str, Any]:
        params, shown = body["sampling_params"], tokens[start:count]
        last = tokens[count - 1][1]
        stopped = {"type": "stop", "matched": last} if last in params["stop_token_ids"] else None
        cut = {"type": "length", "length": params["max_new_tokens"]} if count == params["max_new_tokens"] else None
        meta: dict[str, Any] = {
            "id": body.get("rid", "made-up"),
            "finish_reason": stopped or cut,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.label,
            "completion_tokens": count,
            "cached_tokens": 0,
            "output_token_logprobs": shown,
        }
        if "token_ids_logprob" in body:
            meta["output_token_ids_logprobs"] = [[(_full(i, 0), i, None) for i in body["token_ids_logprob"]]]
        return {"text": "é" * len(shown), "output_ids": [one[1] for one in shown], "meta_info": meta}

    def _tokens(self, body: dict[str, Any]) -> list[tuple[float, int, None]]:
        """The whole reply to a request, up to a stop."""
        params = body["sampling_params"]
        rng = random.Random(str(params.get("sampling_seed", len(self.requests))) + str(body["input_ids"]))
        ids = [rng.randrange(1, 58) for _ in range(params["max_new_tokens"])]
        stops = [place for place, token_id in enumerate(ids) if token_id in params["stop_token_ids"]]
        tempered = params["temperature"] not in (0.0, 1.0) and not self.original
        scored = [(_full(i, place) / (2 if tempered else 1), i, None) for place, i in enumerate(ids)]
        return scored[: stops[0] + 1] if stops else scored


def _full(token_id: int, place: int) -> float:
    return -((token_id * 7919 + place * 104_729) % 4096 + 1) / 1024


@asynccontextmanager
async def sglang(*servers: SglangDouble, folder: Path | None = None) -> AsyncIterator[SglangEngine]:
    """An engine opened as a run opens it."""
    section = SglangSection(name="sglang", url=tuple(server.url for server in servers), down_s=0)
    with tempfile.TemporaryDirectory() as empty:
        (Path(empty) / "config.json").write_text('{"vocab_size": 60}')
        engine = await asyncio.to_thread(open_engine, folder or Path(empty), name=MODEL, section=section, seed=0)
        try:
            yield engine
        finally:
            await engine.close()
