"""vLLM's token dialect: `/inference/v1/generate`, token ids in, token ids with their log-probabilities out."""

from typing import Any

import orjson

from penstock.chat.tokenizer import Tokenizer
from penstock.errors import RequestError
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import EventWriter, ModelAnswer
from penstock.gateway.dialects.chat import error_body
from penstock.gateway.dialects.fields import HARMLESS, SAMPLING_FIELDS, check_harmless, read_sampling, refuse_unsupported
from penstock.gateway.reply import sse_data
from penstock.gateway.request import ConversationHistory, ModelCall
from penstock.records import Sampling

HONOURED = SAMPLING_FIELDS | frozenset({"model", "request_id", "token_ids", "sampling_params", "max_tokens"})
LABELS = frozenset(
    {"logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "cache_salt", "priority"}
    | {"stream_options", "return_token_ids", "include_stop_str_in_output"}
)
"""Fields that do not affect sampling: no text is returned, and log-probabilities always are."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "structured_outputs": (),
    "features": (),
    "content_parts": (),
    "kv_transfer_params": (),
}
"""Fields that are not supported, with the values that have no effect and are accepted."""


class InferenceDialect:
    path = "/inference/v1/generate"
    count_path = None
    ping = b""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocab_size = tokenizer.core.get_vocab_size()

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        merged = fields.nested(body, "sampling_params") | {name: value for name, value in body.items() if value is not None}
        refuse_unsupported(merged, NEUTRAL)
        ids = fields.integers(body, "token_ids")
        if not ids:
            raise fields.invalid("token_ids", "must be a list of token ids, and not empty")
        fields.check_vocabulary(ids, "token_ids", self._vocab_size)
        unknown = merged.keys() - HONOURED - LABELS - NEUTRAL.keys() - HARMLESS.keys()
        model = body.get("model")
        return ModelCall(
            model=model if isinstance(model, str) else "",
            messages=(),
            raw=ids,
            sampling=read_sampling(merged, defaults, "max_tokens"),
            echo=(("request_id", fields.string(body.get("request_id") or "", "request_id")),),
            ignored=(*sorted(name for name in unknown if merged[name] is not None), *check_harmless(merged)),
        )

    def json_body(self, answer: ModelAnswer) -> bytes:
        """See `Dialect.json_body`. Log-probabilities are under the distribution that was sampled from."""
        step = answer.steps[0]
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token_id, logprob in zip(step.completion_ids, step.logprobs, strict=True)
        ]
        choice: dict[str, Any] = {"index": 0, "token_ids": step.completion_ids, "finish_reason": step.finish}
        choice["logprobs"] = {"content": content}
        used = answer.usage([step])
        usage = {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens}
        return orjson.dumps(
            {
                "request_id": dict(answer.call.echo)["request_id"] or answer.id,
                "model": answer.model,
                "choices": [choice],
                "usage": usage | {"total_tokens": sum(usage.values())},
                "prompt_logprobs": None,
                "kv_transfer_params": None,
            }
        )

    def events(self, answer: ModelAnswer) -> EventWriter:
        """See `Dialect.events`. Always raises: `parse` refuses a call that streams."""
        raise RequestError(f"{self.path} does not stream here", code="unsupported_parameter", param="stream")

    def count(self, tokens: int) -> dict[str, Any]:
        return {"total_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: RequestError) -> bytes:
        return sse_data(error_body(error))
