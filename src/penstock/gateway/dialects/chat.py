"""The OpenAI chat dialect: `/v1/chat/completions`, with vLLM's `return_token_ids`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from penstock.errors import RequestError
from penstock.gateway.calls import Call
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import Answer, Fresh
from penstock.gateway.stream import Delta, IssuedCall, sse, tool_call
from penstock.records import Sampling, Step
from penstock.render.tokenizer import Tokenizer

HONOURED = frozenset(
    {"model", "messages", "tools", "tool_choice", "n", "stream", "stream_options", "logprobs", "return_token_ids"}
    | {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "max_tokens", "max_completion_tokens"}
)
LABELS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields that say who asks or how to keep the answer; sampling does not depend on them."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "reasoning_effort": ("none",),
    "audio": (),
    "functions": (),
    "function_call": ("none",),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Fields that would change the sampling in a way that is not offered, with the values that change nothing."""

MOST_CHOICES = 128


class ChatDialect:
    """See `Dialect`."""

    path = "/v1/chat/completions"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def parse(self, body: dict[str, Any], defaults: Sampling) -> Call:
        """See `Dialect.parse`."""
        for name, neutral in NEUTRAL.items():
            value = body.get(name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name}={fields.shown(value)} is not supported; leave it out", code="unsupported_parameter", param=name
                )
        tools = fields.tools(body.get("tools"))
        options = fields.entry(body.get("stream_options") or {})
        if options is None:
            raise fields.wrong("stream_options", "must be an object")
        model = body.get("model", "")
        return Call(
            model=model if isinstance(model, str) else "",
            messages=fields.messages(body.get("messages")),
            sampling=_sampling(body, defaults),
            tools=tools,
            reads_calls=_may_call(body.get("tool_choice")) and bool(tools),
            choices=fields.integer(body, "n", 1, low=1, high=MOST_CHOICES),
            stream=fields.flag(body, "stream"),
            usage_in_stream=fields.flag(options, "include_usage"),
            logprobs=fields.flag(body, "logprobs"),
            token_ids=fields.flag(body, "return_token_ids"),
            ignored=tuple(sorted(body.keys() - HONOURED - LABELS - NEUTRAL.keys())),
        )

    def whole(self, answer: Answer) -> bytes:
        """See `Dialect.whole`."""
        choices = [self._choice(answer, place, step) for place, step in enumerate(answer.steps)]
        body = self._head(answer, "chat.completion") | {"choices": choices, "usage": _usage(answer)}
        if answer.call.token_ids:
            body["prompt_token_ids"] = answer.prompt.ids
        return orjson.dumps(body)

    def opening(self, answer: Answer) -> bytes:
        """See `Dialect.opening`."""
        choices = [_entry(choice, {"role": "assistant", "content": ""}) for choice in range(answer.call.choices)]
        event = self._head(answer, "chat.completion.chunk") | {"choices": choices}
        if answer.call.token_ids:
            event["prompt_token_ids"] = answer.prompt.ids
        return sse(event)

    def grown(self, answer: Answer, choice: int, deltas: list[Delta], fresh: Fresh) -> bytes:
        """See `Dialect.grown`."""
        changes: list[dict[str, Any]] = [_change(delta) for delta in deltas]
        if not changes and fresh.ids and (answer.call.token_ids or answer.call.logprobs):
            changes = [{}]
        parts = [self._event(answer, choice, change) for change in changes[:-1]]
        if changes:
            parts.append(self._event(answer, choice, changes[-1], fresh=fresh))
        return b"".join(parts)

    def closing(self, answer: Answer, choice: int, step: Step, fresh: Fresh) -> bytes:
        """See `Dialect.closing`."""
        return self._event(answer, choice, {}, finish=_finish(step), fresh=fresh)

    def ending(self, answer: Answer) -> bytes:
        """See `Dialect.ending`."""
        usage = b""
        if answer.call.usage_in_stream:
            usage = sse(self._head(answer, "chat.completion.chunk") | {"choices": [], "usage": _usage(answer)})
        return usage + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> dict[str, Any]:
        """See `Dialect.error`."""
        return error_body(error)

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}

    def _event(
        self, answer: Answer, choice: int, delta: dict[str, Any], *, finish: str | None = None, fresh: Fresh | None = None
    ) -> bytes:
        entry = _entry(choice, delta, finish)
        if fresh and answer.call.logprobs:
            entry["logprobs"] = self._logprobs(*fresh)
        if fresh and answer.call.token_ids:
            entry["token_ids"] = fresh.ids
        return sse(self._head(answer, "chat.completion.chunk") | {"choices": [entry]})

    def _choice(self, answer: Answer, place: int, step: Step) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": place, "message": step.message, "finish_reason": _finish(step), "logprobs": None}
        if answer.call.logprobs:
            choice["logprobs"] = self._logprobs(step.completion_ids, step.full_logprobs or step.logprobs)
        if answer.call.token_ids:
            choice["token_ids"] = step.completion_ids
        return choice

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Of the model's plain distribution, as vLLM gives them; the ones sampled from are in the record."""
        content: list[dict[str, Any]] = []
        for token_id, logprob in zip(ids, logprobs, strict=True):
            spelt = self._tokenizer.token_bytes(token_id)
            content.append(
                {"token": spelt.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(spelt), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the OpenAI form, which the routes without a dialect use too."""
    kinds = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _sampling(body: dict[str, Any], defaults: Sampling) -> Sampling:
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    top_k = fields.integer(body, "top_k", defaults.top_k, low=-1)
    seed = body.get("seed")
    return replace(
        defaults,
        max_tokens=fields.integer(body, limit, defaults.max_tokens, low=1),
        temperature=fields.number(body, "temperature", defaults.temperature, low=0, high=100),
        top_p=fields.number(body, "top_p", defaults.top_p, low=1e-6, high=1),
        top_k=max(top_k, 0),
        min_p=fields.number(body, "min_p", defaults.min_p, low=0, high=1),
        stop=fields.strings(body, "stop") or defaults.stop,
        stop_ids=(*defaults.stop_ids, *fields.integers(body, "stop_token_ids")),
        seed=defaults.seed if seed is None else fields.integer(body, "seed", 0, low=-(2**53)),
    )


def _may_call(choice: Any) -> bool:
    if choice in (None, "auto", "none"):
        return choice != "none"
    raise RequestError(
        f"tool_choice={fields.shown(choice)} is not supported; use 'auto' or 'none'",
        code="unsupported_parameter",
        param="tool_choice",
    )


def _entry(choice: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": None}


def _change(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, IssuedCall):
        return {"tool_calls": [{"index": delta.ordinal, **tool_call(delta)}]}
    return {"content": delta.text}


def _finish(step: Step) -> str:
    return "tool_calls" if step.message.get("tool_calls") and step.finish == "stop" else step.finish


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt.ids), sum(len(step.completion_ids) for step in answer.steps)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
