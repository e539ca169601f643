"""The legacy completions dialect: `/v1/completions`, a prompt without a chat template, with vLLM's `return_token_ids`."""

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.chat.tokenizer import Tokenizer
from penstock.errors import RequestError
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import ModelAnswer, UnsentTokens
from penstock.gateway.dialects.chat import error_body
from penstock.gateway.dialects.fields import (
    HARMLESS,
    SAMPLING_FIELDS,
    check_harmless,
    read_bias,
    read_sampling,
    refuse_unsupported,
    unsupported,
)
from penstock.gateway.reply import CallDelta, Delta, sse_data
from penstock.gateway.request import ConversationHistory, ModelCall
from penstock.records import Sampling, Step, TokenLogprobs

HONOURED = SAMPLING_FIELDS | frozenset(
    {"model", "prompt", "max_tokens", "n", "best_of", "echo", "logprobs", "stream", "stream_options", "return_token_ids"}
    | {"logit_bias"}
)
LABELS = frozenset({"user"})
"""Fields that do not affect sampling; ignored without a notice."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (False,),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Fields that are not supported, with the values that have no effect and are accepted."""


KNOWN = HONOURED | LABELS | NEUTRAL.keys() | HARMLESS.keys()


class CompletionsDialect:
    path = "/v1/completions"
    count_path = None
    ping = b": still sampling\n\n"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.core.get_vocab_size()

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        refuse_unsupported(body, NEUTRAL)
        choices = fields.integer(body, "n", 1, low=1, high=fields.MAX_CHOICES)
        if body.get("best_of") not in (None, choices):
            raise unsupported("best_of", body["best_of"])
        with_logprobs = body.get("logprobs") is not None and body["logprobs"] is not False
        likely = fields.top_logprobs(body, "logprobs") if with_logprobs else 0
        if with_logprobs and fields.flag(body, "echo"):
            raise RequestError("echo with logprobs is not supported; leave one out", code="unsupported_parameter", param="echo")
        options = fields.nested(body, "stream_options")
        model = body.get("model", "")
        return ModelCall(
            model=model if isinstance(model, str) else "",
            messages=(),
            raw=self._prompt(body.get("prompt")),
            sampling=read_bias(body, read_sampling(body, defaults, "max_tokens", top_logprobs=likely)),
            choices=choices,
            stream=fields.flag(body, "stream"),
            usage_in_stream=fields.flag(options, "include_usage"),
            logprobs=with_logprobs,
            token_ids=fields.flag(body, "return_token_ids"),
            echo=(("echo", fields.flag(body, "echo")),),
            ignored=(
                *sorted(
                    name for name in body.keys() - HONOURED - LABELS - NEUTRAL.keys() - HARMLESS.keys() if body[name] is not None
                ),
                *check_harmless(body),
            ),
        )

    def json_body(self, answer: ModelAnswer) -> bytes:
        head = echoed_prompt(answer, self._tokenizer)
        choices: list[dict[str, Any]] = []
        for place, step in enumerate(answer.steps):
            choice = choice_entry(place, head + (step.message["content"] or ""), finish=step.finish)
            if answer.call.logprobs:
                values = step.full_logprobs or step.logprobs
                choice["logprobs"] = logprobs(self._tokenizer, step.completion_ids, values, step.most_likely)
            if answer.call.token_ids:
                choice |= {"token_ids": step.completion_ids, "prompt_token_ids": tuple(answer.prompt.ids)}
            choices.append(choice)
        return orjson.dumps(response_head(answer) | {"choices": choices, "usage": usage(answer, answer.steps)})

    def events(self, answer: ModelAnswer) -> "CompletionEvents":
        return CompletionEvents(answer, self._tokenizer)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"total_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: RequestError) -> bytes:
        return sse_data(error_body(error))

    def _prompt(self, value: Any) -> str | tuple[int, ...]:
        """Return the prompt as text or token ids; `value` may also be a list of one prompt."""
        listed = fields.as_list(value)
        if listed and not isinstance(listed[0], int):
            if len(listed) > 1:
                raise fields.invalid("prompt", f"holds {len(listed)} prompts; send one in each request")
            value = listed[0]
        if isinstance(value, str) and value:
            return value
        ids = fields.integers({"prompt": value}, "prompt") if fields.as_list(value) else ()
        if not ids:
            raise fields.invalid("prompt", f"must be text or a list of token ids, and not empty; not {fields.preview(value)}")
        fields.check_vocabulary(ids, "prompt", self._vocab_size)
        return ids


class CompletionEvents:
    def __init__(self, answer: ModelAnswer, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._head = response_head(answer)
        self._sent_characters = [0] * answer.call.choices
        """Per choice: the text offset of the next token."""

    def start(self) -> bytes:
        text = echoed_prompt(self._answer, self._tokenizer)
        if not text and not self._answer.call.token_ids:
            return b""
        choices = [choice_entry(place, text) for place in range(self._answer.call.choices)]
        if self._answer.call.token_ids:
            choices = [choice | {"token_ids": [], "prompt_token_ids": tuple(self._answer.prompt.ids)} for choice in choices]
        return sse_data(self._head | {"choices": choices})

    def delta(self, choice: int, deltas: list[Delta], unsent: UnsentTokens) -> bytes:
        text = "".join([delta.text for delta in deltas if not isinstance(delta, CallDelta)])
        sends_tokens = self._answer.call.token_ids or self._answer.call.logprobs
        return self._event(choice, text, unsent) if text or (unsent.ids and sends_tokens) else b""

    def finish_choice(self, choice: int, step: Step, unsent: UnsentTokens) -> bytes:
        return self._event(choice, "", unsent, finish=step.finish)

    def finish(self, steps: list[Step]) -> bytes:
        counted = b""
        if self._answer.call.usage_in_stream:
            counted = sse_data(self._head | {"choices": [], "usage": usage(self._answer, steps)})
        return counted + b"data: [DONE]\n\n"

    def _event(self, choice: int, text: str, unsent: UnsentTokens, *, finish: str | None = None) -> bytes:
        entry = choice_entry(choice, text, finish=finish)
        if self._answer.call.logprobs:
            entry["logprobs"] = logprobs(self._tokenizer, *unsent, start=self._sent_characters[choice])
            self._sent_characters[choice] += sum(map(len, entry["logprobs"]["tokens"]))
        if self._answer.call.token_ids:
            entry["token_ids"] = unsent.ids
        return sse_data(self._head | {"choices": [entry]})


def response_head(answer: ModelAnswer) -> dict[str, Any]:
    """Return the fields that the response and each of its events share."""
    return {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": int(answer.created), "model": answer.model}


def echoed_prompt(answer: ModelAnswer, tokenizer: Tokenizer) -> str:
    """Return the prompt text if the call asks to echo it, else an empty string."""
    if not dict(answer.call.echo).get("echo"):
        return ""
    raw = answer.call.raw
    return raw if isinstance(raw, str) else tokenizer.decode(answer.prompt.ids)


def choice_entry(place: int, text: str, *, finish: str | None = None) -> dict[str, Any]:
    return {"index": place, "text": text, "logprobs": None, "finish_reason": finish}


def logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    values: Sequence[float],
    most_likely: Sequence[TokenLogprobs] = (),
    *,
    start: int = 0,
) -> dict[str, Any]:
    """Format log-probabilities. Callers pass those of the plain distribution where known. `start`: text offset of the first."""

    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    tokens = [text(token_id) for token_id in ids]
    likely = [{text(token_id): logprob for token_id, logprob in each} for each in most_likely] or None
    offsets: list[int] = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return {"tokens": tokens, "token_logprobs": list(values), "top_logprobs": likely, "text_offset": offsets}


def usage(answer: ModelAnswer, steps: Sequence[Step]) -> dict[str, int]:
    prompt, sampled = len(answer.prompt.ids), sum(len(step.completion_ids) for step in steps)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
