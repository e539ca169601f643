"""A server that speaks as vLLM does and takes weights as vLLM does, in its own process: `python weight_server.py MODEL`.

It samples nothing real, but every token carries the version of the weights that the server held at that moment, as its
log-probability: what is recorded of it can be held against that. It prints its address, then `+` for each reply that it begins and
`-` for each that it is done with.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

VOCABULARY, CONTEXT, TOKEN_S = 259, 512, 0.004
LETTERS = range(64, 90)
"""Ids that are letters to the tokenizer of the tests; nothing else is sampled before the end."""


def logprob_of(version: int) -> float:
    """What a token says of the weights that sampled it."""
    return -(version + 1) / 4096


class WeightServer:
    """One model; weights are known by the number that their folder is called, those of the start by any other name."""

    def __init__(self, model: str) -> None:
        self.model, self.version, self.label = model, 0, "as started"
        self.going = asyncio.Event()
        self.going.set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._well)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weights)
        app.router.add_get("/server_info", self._settings)
        app.router.add_get("/version", self._version)
        app.router.add_get("/openapi.json", self._routes)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/collective_rpc", self._reload)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/update_weight_version", self._name)
        return app

    async def _well(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _routes(self, request: web.Request) -> web.Response:
        paths = {resource.canonical: {} for resource in request.app.router.resources()}
        return web.json_response({"paths": paths})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {os.getpid()}\n")

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.going.is_set()})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": CONTEXT, "parent": None}]})

    async def _weights(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _settings(self, request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {"device_config": {"device": "cuda"}}})

    async def _pause(self, request: web.Request) -> web.Response:
        self.going.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({"status": "resumed"})

    async def _reload(self, request: web.Request) -> web.Response:
        folder = Path((await request.json())["kwargs"]["weights_path"])
        assert not self.going.is_set() and (folder / "model.safetensors").exists()
        self.version = int(folder.name) if folder.name.isdecimal() else 0
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _name(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if max(body["prompt"]) >= VOCABULARY:
            return web.json_response({"error": {"message": "Token id is out of vocabulary", "code": 400}}, status=400)
        if not body["stream"]:
            return web.json_response({"choices": [self._chunk(1, 0.0 if body["top_k"] == 1 else self._stamp(), "length")]})
        os.write(1, b"+")
        try:
            return await self._stream(request, body)
        except ConnectionResetError:
            return web.Response()
        finally:
            os.write(1, b"-")

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        ids = [random.choice(LETTERS) for _ in range(random.randrange(3, 12))][: body["max_tokens"] - 1] + body["stop_token_ids"][
            :1
        ]
        for place, token_id in enumerate(ids):
            await asyncio.sleep(TOKEN_S)
            await self.going.wait()
            chunk = self._chunk(token_id, self._stamp(), "stop" if place + 1 == len(ids) else None)
            if not place:
                chunk["prompt_token_ids"] = body["prompt"]
            await response.write(b"data: " + json.dumps({"choices": [chunk]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _stamp(self) -> float:
        return logprob_of(self.version)

    def _chunk(self, token_id: int, logprob: float, finish: str | None) -> dict[str, Any]:
        logprobs = {"token_logprobs": [logprob], "tokens": [""], "text_offset": [0], "top_logprobs": [{}]}
        return {"index": 0, "text": "", "token_ids": [token_id], "logprobs": logprobs, "finish_reason": finish}


async def main(model: str) -> None:
    runner = web.AppRunner(WeightServer(model).app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
