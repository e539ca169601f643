"""Asks a real vLLM server every route that Penstock uses, and writes the answers down.

`python record.py URL MODEL_FOLDER OUT.json [--ipc] [--sleep] [--failures]`. The double of the tests plays these answers.
Standard library only, except for `--ipc`, which sends weights by CUDA IPC. With `--pictures FILE.png…` after OUT.json it asks a
server with a model of pictures, such as that of `tests/helpers/tiny_vision.py`, about these alone.
"""

import base64
import json
import pickle
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

KEPT_CONFIG = ("model_config", "device_config", "weight_transfer_config", "parallel_config", "cache_config", "load_config")
TOKEN = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 1.0, "logprobs": 0, "return_token_ids": True, "seed": 1}


class Recorder:
    def __init__(self, url: str, model: Path) -> None:
        self.url, self.model = url, model
        self.answers: list[dict[str, Any]] = []

    def ask(
        self,
        label: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        keep: Any = None,
        limit_s: float = 60.0,
        whole: bool = False,
    ) -> Any:
        """GET, or POST `body`; `keep` shortens what is written down of the answer, and without `whole` so is the body.

        Returns the parsed answer.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        begun = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                status, kind, text = answer.status, answer.headers.get("content-type"), answer.read().decode()
        except urllib.error.HTTPError as error:
            status, kind, text = error.code, error.headers.get("content-type"), error.read().decode()
        except OSError as error:
            status, kind, text = 0, None, str(error)
        took_s = time.monotonic() - begun
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = text
        kept = keep(parsed) if keep and status == 200 else parsed
        kept = kept if len(json.dumps(kept)) < 20_000 else json.dumps(kept)[:2000]
        method = "GET" if body is None else "POST"
        shown = body if whole else json.dumps(body)[:300] if body else body
        entry = {"label": label, "request": f"{method} {path}", "body": shown, "status": status, "type": kind, "answer": kept}
        self.answers.append(entry | {"seconds": round(took_s, 3)})
        print(label, status, json.dumps(kept)[:160], f"{took_s:.3f} s", flush=True)
        return parsed

    def sample(self, label: str) -> None:
        self.ask(label, "/v1/completions", {"model": self.name, **TOKEN})

    def record(self) -> None:
        self.ask("version", "/version")
        self.ask("health", "/health")
        self.ask("routes", "/openapi.json", keep=lambda found: sorted(found["paths"]))
        self.name = self.ask("models", "/v1/models")["data"][0]["id"]
        self.ask("settings", "/server_info?config_format=json", keep=short_settings)
        self.ask("settings as text", "/server_info", keep=lambda found: str(found.get("vllm_config"))[:3000])
        self.ask(
            "start time", "/metrics", keep=lambda text: [x for x in text.splitlines() if "start_time" in x or "cache_config" in x]
        )
        self.ask("world size", "/get_world_size")
        self.ask("weight info", "/weight_info")
        self.ask("is paused", "/is_paused")
        self.ask("is sleeping", "/is_sleeping")
        self.sample("sample before")
        self.ask("tokenize", "/tokenize", {"model": self.name, "prompt": "a"})
        self.ask("pause", "/pause?mode=keep", {})
        self.ask("is paused then", "/is_paused")
        self.ask("health while paused", "/health")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.model)}}
        for n in range(2):
            self.ask(f"reload {n}", "/collective_rpc", reload)
        self.ask("reset", "/reset_prefix_cache?reset_running_requests=true", {})
        self.ask("name weights", "/update_weight_version", {"new_version": "penstock-x-1"})
        self.ask("weight info then", "/weight_info")
        self.ask("resume", "/resume", {})
        self.ask("resume again", "/resume", {})
        self.sample("sample after")
        self.in_shared_memory(reload)

    def in_shared_memory(self, reload: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            shutil.copytree(self.model, folder, dirs_exist_ok=True)
            self.ask("reload from shared memory", "/collective_rpc", {**reload, "kwargs": {"weights_path": folder}})

    def record_ipc(self) -> None:
        import torch
        from safetensors.torch import load_file
        from torch.multiprocessing.reductions import reduce_tensor

        weights = {k: v.to(torch.bfloat16).cuda() for k, v in load_file(self.model / "model.safetensors").items()}
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        self.ask("ipc init", "/init_weight_transfer_engine", {"init_info": {}})
        for n in range(3):
            begun = time.monotonic()
            handles = [{uuid: reduce_tensor(value)[1]} for value in weights.values()]
            update = {
                "names": list(weights),
                "dtype_names": [str(value.dtype).removeprefix("torch.") for value in weights.values()],
                "shapes": [list(value.shape) for value in weights.values()],
                "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
            }
            self.ask("pause", "/pause?mode=keep", {})
            self.ask("ipc start", "/start_weight_update", {})
            self.ask("ipc update", "/update_weights", {"update_info": update})
            self.ask("ipc finish", "/finish_weight_update", {})
            self.ask("reset", "/reset_prefix_cache?reset_running_requests=true", {})
            self.ask("resume", "/resume", {})
            print(f"ipc round {n}: {time.monotonic() - begun:.3f} s", flush=True)
        self.sample("sample after ipc")
        self.ask("ipc finish without start", "/finish_weight_update", {})
        self.ask("pause", "/pause?mode=keep", {})
        self.ask("ipc start", "/start_weight_update", {})
        self.ask("ipc start twice", "/start_weight_update", {})
        self.ask(
            "ipc update of a wrong device", "/update_weights", {"update_info": update | {"ipc_handles_pickled": nowhere(handles)}}
        )
        self.ask("ipc finish after failure", "/finish_weight_update", {})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.model)}}
        self.ask("reload after failure", "/collective_rpc", reload)
        self.ask("resume", "/resume", {})
        self.sample("sample after a failed transfer")
        del weights

    def record_pictures(self, files: list[str]) -> None:
        self.ask("version", "/version")
        self.ask(
            "fields", "/openapi.json", keep=lambda found: sorted(found["components"]["schemas"]["GenerateRequest"]["properties"])
        )
        self.name = self.ask("models", "/v1/models")["data"][0]["id"]
        pictures = [base64.b64encode(Path(file).read_bytes()).decode() for file in files]
        urls = [f"data:image/png;base64,{picture}" for picture in pictures]
        for url in [*urls, "data:image/png;base64,AAAA"]:
            rendered = self.render(f"render {url[-8:]}", [url])
            if "token_ids" in rendered:
                ids, [place] = rendered["token_ids"], rendered["features"]["mm_placeholders"]["image"]
                head, tail = ids[: place["offset"]], ids[place["offset"] + place["length"] :]
        both = self.render("render all", urls)["token_ids"]
        mark = next(i for i in both if both.count(i) == max(map(both.count, both)))  # the token that stands for a part of a picture
        self.generate("generate", [*head, mark, *tail], urls[:1])
        self.generate("generate with all", [*head, *[mark] * len(urls), *tail], urls)
        self.generate("generate with a mark after them", [*head, mark, *tail, mark], urls[:1])
        self.generate("generate with too few marks", [*head, mark, *tail], urls * 2)
        self.generate("generate with a picture that is none", [*head, mark, *tail], ["data:image/png;base64,AAAA"])

    def render(self, label: str, urls: list[str]) -> Any:
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"model": self.name, "messages": [{"role": "user", "content": content}], "mm_payload": "none"}
        return self.ask(label, "/v1/chat/completions/render", body, whole=True)

    def generate(self, label: str, ids: list[int], urls: list[str]) -> None:
        settings = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "seed": 1, "detokenize": False}
        parts = [{"type": "image_url", "url": url} for url in urls]
        body = {"model": self.name, "token_ids": ids, "content_parts": parts, "sampling_params": settings}
        self.ask(label, "/inference/v1/generate", body | {"return_token_ids": True, "stream": True}, whole=True)

    def record_sleep(self) -> None:
        self.ask("sleep", "/sleep?level=1&mode=keep", {})
        self.ask("is sleeping then", "/is_sleeping")
        self.ask("is paused asleep", "/is_paused")
        self.ask("wake", "/wake_up", {})
        self.ask("is paused awake", "/is_paused")
        self.sample("sample after sleep")

    def record_failures(self) -> None:
        """Last, as they may leave a server behind that serves no more."""
        self.ask("pause", "/pause?mode=keep", {})
        self.ask("reload of nothing", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}})
        self.ask("reload after that", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.model)}})
        self.ask("reset", "/reset_prefix_cache?reset_running_requests=true", {})
        self.ask("resume", "/resume", {})
        self.sample("sample after a failed reload")
        self.ask("health at the end", "/health")


def short_settings(found: dict[str, Any]) -> dict[str, Any]:
    config = found["vllm_config"]
    env = {k: v for k, v in found.get("vllm_env", {}).items() if k in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION")}
    kept = {key: config.get(key) for key in KEPT_CONFIG} if isinstance(config, dict) else str(config)[:3000]
    return {"keys": sorted(found), "vllm_config": kept, "vllm_env": env, "config_keys": sorted(config)}


def nowhere(handles: list[dict[str, Any]]) -> str:
    return base64.b64encode(pickle.dumps([{"GPU-none": next(iter(handle.values()))} for handle in handles])).decode()


def main(url: str, model: str, out: str, *options: str) -> None:
    recorder = Recorder(url, Path(model))
    try:
        if "--pictures" in options:
            return recorder.record_pictures([option for option in options if option != "--pictures"])
        recorder.record()
        if "--ipc" in options:
            recorder.record_ipc()
        if "--sleep" in options:
            recorder.record_sleep()
        if "--failures" in options:
            recorder.record_failures()
    finally:
        Path(out).write_text(json.dumps(recorder.answers, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
