"""Engine for SGLang servers: `/generate` with token ids, and weights updated from disk."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.engines.fleet import EngineServer
from penstock.engines.servers.base import RemoteEngine, RemoteModel, open_remote
from penstock.engines.servers.pauses import RecoverySteps, ServerCall
from penstock.engines.servers.replies import ReplyReader
from penstock.engines.servers.server_weights import PublishedWeights, ServedAdapter, adapter_roots
from penstock.engines.servers.settings import RemoteSection
from penstock.errors import EngineRefused
from penstock.http.client import HttpClient, UpstreamError
from penstock.records import Sampling


def request_body(prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.grammar is not None:
        params["json_schema"] = sampling.grammar.schema
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {"rid": key, "input_ids": prompt, "sampling_params": params, "stream": True, "return_logprob": True}


class SglangReader(ReplyReader):
    """Reads the events of one reply. Depending on the server's options, each holds all tokens so far or only the new ones."""

    def __init__(
        self, prompt: list[int], sampling: Sampling, *, version: int, label: str | None, behaviour_known: bool = True
    ) -> None:
        super().__init__(prompt, sampling, version=version, behaviour_known=behaviour_known)
        self._label = label
        """The label that the server must report for its weights; None if it still has those it was started with."""
        self._count = 0

    def read(self, event: dict[str, Any]) -> None:
        meta: dict[str, Any] = event["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise UpstreamError(f"broke the reply off ({reason.get('message', 'abort')})", kind="broken")
        if self._label is not None and meta["weight_version"] != self._label:
            raise UpstreamError(
                f"sampled with weights that it calls {meta['weight_version']!r}, not with those it was given", kind="broken"
            )
        if meta["prompt_tokens"] != len(self._prompt):
            raise UpstreamError(
                "sampled after another prompt than it was given; is something between that rewrites it?", kind="garbled"
            )
        total: int = meta["completion_tokens"]
        scored: list[tuple[float, int, Any]] = meta["output_token_logprobs"]
        fresh = total - self._count
        if fresh < 0 or len(scored) not in (total, fresh):
            raise UpstreamError(f"sent {len(scored)} log-probabilities with {total} tokens, {fresh} of them new", kind="garbled")
        self._count = total
        scored = scored[len(scored) - fresh :]
        self.add([entry[1] for entry in scored], [entry[0] for entry in scored], reason and reason["type"])


MIN_TEMPERATURE = 1e-5
"""SGLang treats positive temperatures below about this one as 0."""
PROBE_TEMPERATURE = 2.0
"""The temperature of the probe that finds out which distribution log-probabilities are under."""
PROBE_DRAWS = 3
"""Tokens drawn by the probe."""
LOGPROB_TOLERANCE = 0.05
"""How far two log-probabilities of the same token may differ in half precision."""


class SglangSection(RemoteSection):
    """`[engine]` for `name = "sglang"`."""

    def preflight(self, model: str) -> None:
        SglangEngine.preflight(self, model)


class SglangEngine(RemoteEngine):
    """A fleet of SGLang servers."""

    kind = "SGLang"
    path = "/generate"
    pause_call = ServerCall("/pause_generation", {"mode": "retract"})
    resume_call = ServerCall("/continue_generation", {})
    load_remedy = "start SGLang where the run's folder has the same path as here"
    adapter_remedy = (
        "start SGLang with --enable-lora --max-lora-rank of at least train.rank --lora-target-modules all, "
        "where the run's folder has the same path as here"
    )

    def body(self, prompt: list[int], sampling: Sampling, key: str) -> dict[str, Any]:
        return request_body(prompt, sampling, key)

    def reader(self, prompt: list[int], sampling: Sampling, server: EngineServer) -> SglangReader:
        label = self._published.label if self._published is not None else None
        known = self.behaviour_known(sampling)
        return SglangReader(prompt, sampling, version=server.version, label=label, behaviour_known=known)

    def check_sampling(self, sampling: Sampling) -> None:
        if 0.0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineRefused(f"temperature = {sampling.temperature}: SGLang takes 0 (greedy) or at least {MIN_TEMPERATURE}")
        if sampling.truncated and sampling.temperature not in (0.0, 1.0) and self._served.processed:
            text = "SGLang says of a tempered and truncated token neither with which probability it was drawn nor its plain one"
            raise EngineRefused(f"{text}; leave out top_p, top_k and min_p, or the temperature")
        if sampling.grammar is not None and not sampling.grammar.schema:
            text = "SGLang takes a JSON schema of the whole reply and no grammar of calls or reasoning"
            raise EngineRefused(f"{text}; leave out strict and tool_choice, or the tools")
        if sampling.biased:
            raise EngineRefused("logit_bias is not passed on to SGLang; leave it out")
        if sampling.seed is not None and not self._served.seeded:
            raise EngineRefused("the SGLang server ignores seeds; start it with --enable-deterministic-inference, or send none")

    def behaviour_known(self, sampling: Sampling) -> bool:
        """See `RemoteEngine.behaviour_known`. It never reports the probability among the tokens that truncation keeps.

        Its schemas allow other white space than the grammar that is replayed.
        """
        limited = sampling.truncated or sampling.grammar is not None
        return super().behaviour_known(sampling) and not (limited and sampling.temperature > 0.0)

    async def abort(self, url: str, key: str) -> None:
        """SGLang checks for closed connections only every few seconds, so it gets an explicit request."""
        await self.client.http.request_json(f"{url}/abort_request", {"rid": key})

    def with_adapter(self, body: dict[str, Any], name: str) -> dict[str, Any]:
        return body | {"lora_path": name}

    async def load_adapter(self, url: str, adapter: ServedAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        answer = await self.post(url, ServerCall("/load_lora_adapter", body), limit_s=self._load_s)
        if not answer["success"] and adapter.name not in (answer.get("loaded_adapters") or {}):
            raise UpstreamError(f"{url} has not taken the adapter: {answer.get('error_message')}", kind="refused", status=400)

    async def unload_adapter(self, url: str, name: str) -> None:
        await self.post(url, ServerCall("/unload_lora_adapter", {"lora_name": name}))

    async def listed_adapters(self, url: str) -> dict[str, str]:
        """As `/v1/models` lists them; older versions list none, and are taken at their word that they loaded ours."""
        found = adapter_roots(await self.client.http.request_json(f"{url}/v1/models"), url)
        return found or {adapter.name: str(adapter.folder) for adapter in self._adapters.loaded()}

    async def change_weights(self, url: str, wanted: PublishedWeights) -> None:
        answer = await self.post(url, update_call(wanted), limit_s=self._load_s)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise UpstreamError(f"{url} has not taken the weights: {answer}", kind="broken", status=200)

    def recovery_steps(self, url: str, before: PublishedWeights) -> RecoverySteps:
        return [[update_call(before)], [self.resume_call]]

    async def weights_label(self, url: str) -> str:
        answer = await self.client.http.request_json(f"{url}/get_model_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise UpstreamError(f"{url}/get_model_info does not name its weights", kind="garbled")
        return str(answer["weight_version"])  # pyright: ignore[reportUnknownArgumentType]

    @classmethod
    async def inspect(cls, http: HttpClient, url: str, name: str) -> RemoteModel:
        await http.request_json(f"{url}/health")
        listed = await http.request_json(f"{url}/v1/models")
        args = await http.request_json(f"{url}/get_server_info")
        try:
            model, context_length = str(listed["data"][0]["id"]), int(listed["data"][0]["max_model_len"])
            seeded = bool(args.get("enable_deterministic_inference"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as cause:
            raise UpstreamError(f"{url} does not say what it serves; is it an SGLang server?", kind="garbled") from cause
        return RemoteModel(model, context_length, await _is_processed(http, url), seeded)


def update_call(weights: PublishedWeights) -> ServerCall:
    body = {"model_path": str(weights.folder), "weight_version": weights.label, "flush_cache": True}
    return ServerCall("/update_weights_from_disk", body)


def open_engine(
    folder: Path, *, name: str, section: SglangSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> SglangEngine:
    """See `open_remote`. `seed` and `decode` are unused: servers seed themselves, and the gateway looks for stop strings."""
    return open_remote(SglangEngine, folder, name=name, section=section)


async def _is_processed(http: HttpClient, url: str) -> bool:
    """Whether log-probabilities are after the temperature: at a high one they differ from the plain ones."""
    try:
        drawn = [(await _first_token(http, url, PROBE_TEMPERATURE))["output_token_logprobs"][0] for _ in range(PROBE_DRAWS)]
        ids = [entry[1] for entry in drawn]
        plain = (await _first_token(http, url, 0.0, token_ids_logprob=ids))["output_token_ids_logprobs"][0]
        return any(abs(hot[0] - cold[0]) > LOGPROB_TOLERANCE for hot, cold in zip(drawn, plain, strict=True))
    except (KeyError, IndexError, TypeError, ValueError) as cause:
        raise UpstreamError(f"{url}/generate gives no log-probabilities; is it an SGLang server?", kind="garbled") from cause


async def _first_token(http: HttpClient, url: str, temperature: float, **more: Any) -> dict[str, Any]:
    """Sample one token after a short prompt and return what the server reports about it."""
    body = request_body([0], Sampling(max_tokens=1, temperature=temperature), "") | {"stream": False} | more
    del body["rid"]
    answer = await http.request_json(f"{url}/generate", body)
    return answer["meta_info"]
