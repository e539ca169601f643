"""The white-box dialect: `/generate`, messages or token ids in, text with its ids, log-probabilities and versions out.

Tool calls stay in the text; the calling flow parses them.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import orjson

from penstock.chat.tokenizer import Tokenizer
from penstock.errors import RequestError
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import EventWriter, ModelAnswer
from penstock.gateway.dialects.chat import NEUTRAL as CHAT_NEUTRAL
from penstock.gateway.dialects.completions import NEUTRAL as COMPLETIONS_NEUTRAL
from penstock.gateway.dialects.fields import HARMLESS, SAMPLING_FIELDS, read_sampling, refuse_unsupported
from penstock.gateway.reply import sse_data
from penstock.gateway.request import ConversationHistory, ModelCall
from penstock.records import Sampling

LABELS = frozenset({"trajectory_uid", "prompt_uid", "model", "logprobs"})
"""Fields that do not affect sampling; log-probabilities are always returned."""
HONOURED = LABELS | SAMPLING_FIELDS | {"messages", "tools", "prompt_ids", "sampling_params", "max_tokens"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **CHAT_NEUTRAL,
    **HARMLESS,
    **COMPLETIONS_NEUTRAL,
    "top_logprobs": (0,),
    "skip_special_tokens": (True, False),
    "n": (1,),
    "stream": (False,),
    "tool_choice": ("auto",),
    "image_data": ([], {}),
    "video_data": ([], {}),
    "multi_modal_data": ([], {}),
}
"""Fields that are not supported, with the values that have no effect and are accepted."""


class GenerateDialect:
    path = "/generate"
    count_path = None
    ping = b""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocab_size = tokenizer.core.get_vocab_size()

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        """See `Dialect.parse`. The body holds either `messages` or `prompt_ids`."""
        with _as_422():
            merged = _merged(body)
            refuse_unsupported(merged, NEUTRAL)
            if ("messages" in body) == ("prompt_ids" in body):
                raise fields.invalid("messages", "or prompt_ids must be given, one of the two")
            raw = self._prompt(body["prompt_ids"]) if "prompt_ids" in body else None
            if raw is not None and body.get("tools"):
                raise fields.invalid("tools", "belong to messages; token ids have them in the prompt already")
            return ModelCall(
                model="",
                messages=() if raw is not None else fields.messages(flatten_nested(body["messages"]), history.last_request),
                tools=() if raw is not None else fields.tools(body.get("tools"), history.last_request),
                raw=raw,
                sampling=read_sampling(merged, defaults, "max_tokens"),
                echo=(("prompt_uid", fields.string(body.get("prompt_uid") or "", "prompt_uid")),),
                ignored=(
                    *sorted(name for name in merged.keys() - HONOURED - NEUTRAL.keys() if merged[name] is not None),
                    *(() if raw is not None else fields.ignored_tool_options(body.get("tools"))),
                ),
            )

    def json_body(self, answer: ModelAnswer) -> bytes:
        step = answer.steps[0]
        body: dict[str, Any] = {
            "trajectory_uid": step.rollout_id,
            **dict(answer.call.echo),
            "step_index": step.index,
            "response_text": step.message["content"] or "",
            "response_ids": step.completion_ids,
            "prompt_ids": tuple(answer.prompt.ids),
            "token_ids": step.completion_ids,
            "log_probs": step.logprobs if step.behaviour_known else None,
            **({} if step.behaviour_known else {"full_log_probs": step.logprobs}),
            "stop_reason": step.finish,
            "policy_version": step.versions[-1] if step.versions else None,
            "policy_versions": step.versions,
        }
        if "reasoning_content" in step.message:
            body["reasoning_content"] = step.message["reasoning_content"]
        return orjson.dumps(body)

    def events(self, answer: ModelAnswer) -> EventWriter:
        """See `Dialect.events`. Always raises: `parse` refuses a call that streams."""
        raise RequestError("/generate does not stream; call /v1/chat/completions", code="unsupported_parameter", param="stream")

    def count(self, tokens: int) -> dict[str, Any]:
        return {"total_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        return {"detail": str(error), "code": error.code}

    def error_event(self, error: RequestError) -> bytes:
        return sse_data(self.error(error))

    def _prompt(self, value: Any) -> tuple[int, ...]:
        ids = fields.integers({"prompt_ids": value}, "prompt_ids") if fields.as_list(value) else ()
        if not ids:
            raise fields.invalid("prompt_ids", f"must be a list of token ids, and not empty; not {fields.preview(value)}")
        fields.check_vocabulary(ids, "prompt_ids", self._vocab_size)
        return ids


def flatten_nested(messages: Any) -> Any:
    """Replace a message whose content is a list of messages with that list: callers may wrap a row's prompt in one message."""
    given = fields.as_list(messages)
    if given is None:
        return messages
    spread: list[Any] = []
    for message in given:
        inner = fields.as_list((fields.as_object(message) or {}).get("content"))
        is_conversation = bool(inner) and all("role" in (fields.as_object(part) or {}) for part in inner or ())
        spread += (inner or []) if is_conversation else [message]
    return spread


def _merged(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body merged with `sampling_params`; refuse a field that both set to different values."""
    given = fields.nested(body, "sampling_params")
    for name in given.keys() & body.keys():
        if None not in (given[name], body[name]) and given[name] != body[name]:
            raise fields.invalid(name, "is said twice, and not the same; leave one out")
    return {**given, **{name: value for name, value in body.items() if value is not None or name not in given}}


@contextmanager
def _as_422() -> Generator[None]:
    """Replace status 400 with 422, which this dialect's clients expect."""
    try:
        yield
    except RequestError as error:
        status = 422 if error.status == 400 else error.status
        raise RequestError(str(error), status=status, code=error.code, param=error.param) from error
