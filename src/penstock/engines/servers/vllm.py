"""Engine for vLLM servers: `/v1/completions` with token ids, and weights reloaded in place."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from penstock.engines.fleet import EngineServer
from penstock.engines.servers.base import LOAD_S, RemoteEngine, RemoteModel, RemoteSection, ReplyReader, is_plain, open_remote
from penstock.engines.servers.model_files import ModelContents, PublishedWeights
from penstock.errors import EngineError
from penstock.http.client import HttpClient, UpstreamError
from penstock.records import Sampling


class CompletionChoice(TypedDict, total=False):
    """What one event adds to the reply; only the fields that are read."""

    token_ids: list[int] | None
    logprobs: dict[str, list[float]] | None
    prompt_token_ids: list[int] | None
    """In the first event: the prompt as the server saw it."""
    finish_reason: Literal["stop", "length"] | None


def request_body(model: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """Every setting is sent, because the server's defaults come from the model's generation config."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "logprobs": 0,
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


MIN_TEMPERATURE = 0.01
"""vLLM silently raises positive temperatures below this one."""


class VllmSection(RemoteSection):
    """`[engine]` for `name = "vllm"`."""

    def preflight(self, model: str) -> None:
        VllmEngine.preflight(self, model)


class VllmEngine(RemoteEngine):
    """A fleet of vLLM servers."""

    kind = "vLLM"
    path = "/v1/completions"
    load_remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1, where the run's folder has the same path as here"

    def body(self, prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
        return request_body(self._served.model, prompt, sampling)

    def reader(self, prompt: list[int], sampling: Sampling, server: EngineServer) -> VllmReader:
        return VllmReader(prompt, sampling, version=server.version)

    def check_sampling(self, sampling: Sampling) -> None:
        if 0.0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(f"temperature = {sampling.temperature}: vLLM takes 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not (self._served.processed or sampling.temperature == 0.0 or is_plain(sampling)):
            raise EngineError(
                "the vLLM server cannot say with which probability a tempered or truncated token was drawn; "
                "start it with --logprobs-mode processed_logprobs, or sample at temperature 1 without top_p, top_k and min_p"
            )

    async def load_weights(self, url: str, wanted: PublishedWeights) -> None:
        """See `RemoteEngine.load_weights`. Requests of other clients continue under the new weights, with new caches."""
        post = self.client.http.request_json
        await post(f"{url}/pause?mode=keep", {})
        try:
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(wanted.folder)}}
            await post(f"{url}/collective_rpc", rpc, limit_s=LOAD_S)
            reset = await post(f"{url}/reset_prefix_cache?reset_running_requests=true", {})
            if not reset["success"]:
                raise UpstreamError(f"{url} has kept what it computed with the weights before", kind="broken")
            await post(f"{url}/update_weight_version", {"new_version": wanted.label})
        except UpstreamError:
            with suppress(UpstreamError):
                await post(f"{url}/resume", {})
            raise
        await post(f"{url}/resume", {})

    async def load_obstacle(self, url: str, model: ModelContents) -> str:
        # vLLM crashes on weights of another shape. Its vocabulary size shows in which ids it accepts: the last, but not the next.
        size = model.shapes.get("model.embed_tokens.weight", (0,))[0]
        if size and not (await self._has(url, size - 1) and not await self._has(url, size)):
            return f"its model has not {size} tokens; start it with the model of the run"
        settings = await self.client.http.request_json(f"{url}/server_info?config_format=json")
        if settings["vllm_config"]["device_config"]["device"] == "cpu" and model.config.get("tie_word_embeddings"):
            return (
                "on a CPU vLLM keeps a packed copy of an output layer that is tied to the embeddings, and does not renew it; "
                "use a GPU, or a model folder whose `lm_head.weight` is its own (`tie_word_embeddings`: false)"
            )
        return ""

    async def _has(self, url: str, token_id: int) -> bool:
        body = request_body(self._served.model, [token_id], Sampling(max_tokens=1)) | {"stream": False}
        try:
            await self.client.http.request_json(url + self.path, body)
        except UpstreamError as error:
            if error.kind != "refused":
                raise
            return False
        return True

    async def weights_label(self, url: str) -> str:
        answer = await self.client.http.request_json(f"{url}/weight_info")
        return str(answer["weight_version"])

    @classmethod
    async def inspect(cls, http: HttpClient, url: str, name: str) -> RemoteModel:
        await http.request_json(f"{url}/health")
        listed = await http.request_json(f"{url}/v1/models")
        try:
            models = {str(entry["id"]): entry for entry in listed["data"] if not entry.get("parent")}
            chosen = name if name in models else next(iter(models)) if len(models) == 1 else None
            if chosen is None:
                raise UpstreamError(f"{url} serves {', '.join(models) or 'nothing'}, and not {name}", kind="refused")
            context_length = int(models[chosen]["max_model_len"])
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise UpstreamError(f"{url}/v1/models does not say what is served; is it a vLLM server?", kind="garbled") from cause
        return RemoteModel(chosen, context_length, await _is_processed(http, url, chosen))


def open_engine(
    folder: Path, *, name: str, section: VllmSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> VllmEngine:
    """See `open_remote`. `seed` and `decode` are unused: servers seed themselves, and the gateway looks for stop strings."""
    return open_remote(VllmEngine, folder, name=name, section=section)


async def _is_processed(http: HttpClient, url: str, model: str) -> bool:
    """Whether log-probabilities are those after truncation: with top_k = 1 every token must have 0."""
    body = request_body(model, [1], Sampling(max_tokens=4, top_k=1)) | {"stream": False}
    answer = await http.request_json(url + VllmEngine.path, body)
    try:
        logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return max(abs(x) for x in logprobs) < 1e-6
    except (KeyError, IndexError, TypeError, ValueError) as cause:
        raise UpstreamError(f"{url}{VllmEngine.path} gives no log-probabilities; is it a vLLM server?", kind="garbled") from cause
