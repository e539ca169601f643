"""The OpenAI chat dialect: `/v1/chat/completions`, with vLLM's `return_token_ids`."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import orjson

from penstock.chat.parsers.base import Reasoning, Text
from penstock.chat.templates import Tool, flatten
from penstock.errors import RequestError
from penstock.gateway.dialects import fields
from penstock.gateway.dialects.base import DialectTokenizer, ModelAnswer, UnsentTokens
from penstock.gateway.dialects.fields import (
    HARMLESS,
    SAMPLING_FIELDS,
    FreeformReader,
    check_harmless,
    freeform_text,
    read_bias,
    read_sampling,
    refuse_unsupported,
)
from penstock.gateway.reply import CallDelta, Delta, sse_data, tool_call
from penstock.gateway.request import ConversationHistory, ModelCall
from penstock.records import Message, Sampling, Step, TokenLogprobs

HONOURED = frozenset(
    {"model", "messages", "tools", "tool_choice", "n", "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids"}
    | {"max_tokens", "max_completion_tokens", "parallel_tool_calls", "chat_template_kwargs", "continue_final_message"}
    | {"response_format", "functions", "function_call", "logit_bias"}
    | SAMPLING_FIELDS
)
LABELS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields that do not affect sampling; ignored without a notice."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "audio": (),
    "chat_template": (),
    "documents": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Fields that are not supported, with the values that have no effect and are accepted."""


CARRIED = frozenset(
    {"model", "messages", "tools", "tool_choice", "n", "stream", "stream_options", "return_token_ids", "response_format"}
    | {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed"}
    | {"functions", "function_call"}
)
"""Fields that reach an endpoint in another form; all others are passed on as they are."""


class ChatDialect:
    path = "/v1/chat/completions"
    count_path = None
    ping = b": still sampling\n\n"

    def __init__(self, tokenizer: DialectTokenizer) -> None:
        self._tokenizer = tokenizer

    def parse(self, body: dict[str, Any], defaults: Sampling, history: ConversationHistory) -> ModelCall:
        others = body.keys() - HONOURED
        continues = fields.flag(body, "continue_final_message")
        if others and self._tokenizer.is_known:
            refuse_unsupported({**body, "add_generation_prompt": None} if continues else body, NEUTRAL)
        body = functions_as_tools(body)
        tools = fields.tools(body.get("tools"), history.last_request)
        options = fields.as_object(body.get("stream_options") or {})
        if options is None:
            raise fields.invalid("stream_options", "must be an object")
        model = body.get("model", "")
        messages = fields.messages(body.get("messages"), history.last_request)
        prefill = _prefill(messages, body) if continues else ""
        likely = fields.top_logprobs(body)
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        sampling = read_sampling(body, defaults, limit, top_logprobs=likely)
        return ModelCall(
            model=model if isinstance(model, str) else "",
            messages=messages[:-1] if continues else messages,
            prefill=prefill,
            sampling=read_bias(body, sampling) if self._tokenizer.is_known else sampling,
            tools=tools,
            reads_calls=bool(tools) and body.get("tool_choice") != "none",
            one_call=body.get("parallel_tool_calls") is not None and not fields.flag(body, "parallel_tool_calls"),
            template_options=fields.template_options(body.get("chat_template_kwargs"), "chat_template_kwargs"),
            extra=_extra(body, tools),
            forced=fields.forced_tool(body.get("tool_choice"), tools),
            allowed=fields.allowed_tools(body.get("tool_choice"), tools),
            strict=fields.strict_tools(tools),
            format=fields.reply_format(body.get("response_format"), "response_format"),
            choices=fields.integer(body, "n", 1, low=1, high=fields.MAX_CHOICES),
            stream=fields.flag(body, "stream"),
            usage_in_stream=fields.flag(options, "include_usage"),
            logprobs=fields.flag(body, "logprobs") or likely > 0,
            token_ids=fields.flag(body, "return_token_ids"),
            echo=(("forms", call_forms(body)),),
            ignored=(
                *(sorted(others - LABELS - NEUTRAL.keys() - HARMLESS.keys()) if others else ()),
                *(check_harmless(body) if others else ()),
                *fields.ignored_tool_options(body.get("tools")),
                *fields.unmet_tool_choice(body.get("tool_choice"), tools),
                *(fields.unsupported_names(body, NEUTRAL) if others and not self._tokenizer.is_known else ()),
            ),
        )

    def json_body(self, answer: ModelAnswer) -> bytes:
        choices = [self._choice(answer, index, step) for index, step in enumerate(answer.steps)]
        body = _head(answer, "chat.completion") | {"choices": choices, "usage": _usage(answer, answer.steps)}
        if answer.call.token_ids:
            body["prompt_token_ids"] = tuple(answer.prompt.ids)
        return orjson.dumps(body)

    def events(self, answer: ModelAnswer) -> "ChatEvents":
        return ChatEvents(answer, self._tokenizer)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"total_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_body(error)

    def error_event(self, error: RequestError) -> bytes:
        return sse_data(error_body(error))

    def _choice(self, answer: ModelAnswer, index: int, step: Step) -> dict[str, Any]:
        message = _forms(answer).message(answer.visible(step.message))
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": _finish(answer, step), "logprobs": None}
        if answer.call.logprobs:
            choice["logprobs"] = step_logprobs(self._tokenizer, step)
        if answer.call.token_ids:
            choice["token_ids"] = step.completion_ids
        return choice


class ChatEvents:
    def __init__(self, answer: ModelAnswer, tokenizer: DialectTokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._head = _head(answer, "chat.completion.chunk")
        self._texts = [""] * answer.call.choices
        """By choice, the content sent so far."""
        self._calls = [CallChanges(_forms(answer)) for _ in self._texts]

    def start(self) -> bytes:
        choices = [_entry(choice, {"role": "assistant", "content": ""}) for choice in range(self._answer.call.choices)]
        event = self._head | {"choices": choices}
        if self._answer.call.token_ids:
            event["prompt_token_ids"] = tuple(self._answer.prompt.ids)
        return sse_data(event)

    def delta(self, choice: int, deltas: list[Delta], unsent: UnsentTokens) -> bytes:
        changes: list[dict[str, Any]] = [self._change(choice, delta) for delta in deltas]
        if self._answer.call.keeps_call_text:
            self._texts[choice] += "".join(delta.text for delta in deltas if isinstance(delta, Text))
        if not changes and unsent.ids and (self._answer.call.token_ids or self._answer.call.logprobs):
            changes = [{}]  # tokens without visible text must still be sent
        parts = [self._event(choice, change) for change in changes[:-1]]
        if changes:
            parts.append(self._event(choice, changes[-1], unsent=unsent))
        return b"".join(parts)

    def finish_choice(self, choice: int, step: Step, unsent: UnsentTokens) -> bytes:
        content = step.message["content"] if self._answer.call.keeps_call_text and step.message.get("tool_calls") else None
        rest = {"content": content.removeprefix(self._texts[choice])} if content else {}
        held = [self._event(choice, change) for change in self._calls[choice].rest()]
        return b"".join([*held, self._event(choice, rest, finish=_finish(self._answer, step), unsent=unsent)])

    def finish(self, steps: list[Step]) -> bytes:
        usage = b""
        if self._answer.call.usage_in_stream:
            usage = sse_data(self._head | {"choices": [], "usage": _usage(self._answer, steps)})
        return usage + b"data: [DONE]\n\n"

    def _change(self, choice: int, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, CallDelta):
            return self._calls[choice].change(delta)
        return {"reasoning_content": delta.text} if isinstance(delta, Reasoning) else {"content": delta.text}

    def _event(self, choice: int, delta: dict[str, Any], *, finish: str | None = None, unsent: UnsentTokens | None = None) -> bytes:
        entry = _entry(choice, delta, finish)
        if unsent and self._answer.call.logprobs:
            entry["logprobs"] = logprobs(self._tokenizer, *unsent)
        if unsent and self._answer.call.token_ids:
            entry["token_ids"] = unsent.ids
        return sse_data(self._head | {"choices": [entry]})


def _prefill(messages: Sequence[Message], body: dict[str, Any]) -> str:
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or len(messages) == 1:
        text = "needs a last message of the assistant without tool calls, after others"
        raise fields.invalid("continue_final_message", text)
    if (fields.as_object(body.get("response_format")) or {"type": "text"}).get("type") != "text":
        raise fields.invalid("continue_final_message", "and response_format exclude each other; leave one out")
    return flatten(last["content"])


def step_logprobs(tokenizer: DialectTokenizer, step: Step) -> dict[str, Any]:
    return logprobs(tokenizer, step.completion_ids, step.full_logprobs or step.logprobs, step.most_likely)


def logprobs(
    tokenizer: DialectTokenizer, ids: Sequence[int], values: Sequence[float], most_likely: Sequence[TokenLogprobs] = ()
) -> dict[str, Any]:
    """Format log-probabilities. Callers pass those of the plain distribution where known, as vLLM does."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = tokenizer.token_bytes(token_id)
        return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}

    content = [
        entry(token_id, logprob) | {"top_logprobs": [entry(*other) for other in likely]}
        for token_id, logprob, likely in zip(ids, values, most_likely or [()] * len(ids), strict=True)
    ]
    return {"content": content, "refusal": None}


def error_body(error: RequestError) -> dict[str, Any]:
    """Return an error in the OpenAI form. Routes without a dialect use it too."""
    kinds = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _head(answer: ModelAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(answer.created), "model": answer.model}


def _entry(choice: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": None}


def _extra(body: dict[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """Returns what an endpoint gets as it is, its own tools added to ours."""
    extra = {name: body[name] for name in body.keys() - CARRIED}
    others = fields.vendor_tools(body.get("tools"))
    return {**extra, "tools": [*tools, *others]} if others else extra


def _forms(answer: ModelAnswer) -> "CallForms":
    return cast("CallForms", dict(answer.call.echo)["forms"])


def _finish(answer: ModelAnswer, step: Step) -> str:
    called = "function_call" if _forms(answer).functions else "tool_calls"
    return called if step.message.get("tool_calls") and step.finish == "stop" else step.finish


def _usage(answer: ModelAnswer, steps: list[Step]) -> dict[str, int]:
    used = answer.usage(steps)
    prompt, sampled = used.prompt_tokens, used.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


# Calls in other forms than a function tool's


class CallForms(NamedTuple):
    """What a client reads that is not a call of a function tool."""

    functions: bool = False
    """Whether it sent `functions`: its answer has a `function_call`."""
    freeform: frozenset[str] = frozenset()
    """The names of its freeform tools."""

    def message(self, message: Message) -> Message:
        """A reply with its calls in the client's forms."""
        calls = message.get("tool_calls")
        if not calls or self == CallForms():
            return message
        if self.functions:
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            return {**rest, "function_call": calls[0]["function"]}
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if function["name"] not in self.freeform:
            return call
        return {"id": call["id"], "type": "custom", "custom": _custom(function["name"], freeform_text(function["arguments"]))}


class CallChanges:
    """The calls of one streamed choice as changes of its message."""

    def __init__(self, forms: CallForms) -> None:
        self._forms = forms
        self._readers: dict[int, FreeformReader] = {}
        """By the ordinals of freeform calls."""

    def change(self, delta: CallDelta) -> dict[str, Any]:
        if self._forms.functions:
            named = {"name": delta.name} if delta.begins else {}
            return {"function_call": {**named, "arguments": delta.arguments}}
        if delta.begins and delta.name in self._forms.freeform:
            reader = self._readers[delta.ordinal] = FreeformReader()
            made = {"id": delta.id, "type": "custom", "custom": _custom(delta.name, reader.push(delta.arguments))}
        elif reader := self._readers.get(delta.ordinal):
            made = {"custom": {"input": reader.push(delta.arguments)}}
        else:
            made = tool_call(delta) if delta.begins else {"function": {"arguments": delta.arguments}}
        return {"tool_calls": [{"index": delta.ordinal, **made}]}

    def rest(self) -> Iterator[dict[str, Any]]:
        """Changes with what was held back until the end."""
        for ordinal, reader in self._readers.items():
            if text := reader.finish():
                yield {"tool_calls": [{"index": ordinal, "custom": {"input": text}}]}


def _custom(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "input": text}


def call_forms(body: dict[str, Any]) -> CallForms:
    return CallForms(bool(body.get("functions")), fields.freeform_tools(body.get("tools")))


def functions_as_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The request with `tools` and `tool_choice` for `functions` and `function_call`; of a function one call was made at a time."""
    functions, choice = body.get("functions"), body.get("function_call")
    if not functions:
        return body
    if body.get("tools"):
        raise fields.invalid("functions", "and tools exclude each other; leave one out")
    listed = [fields.as_object(each) or {} for each in fields.as_list(functions) or [None]]
    for place, function in enumerate(listed):
        if not isinstance(function.get("name"), str):
            raise fields.invalid(f"functions[{place}]", "must be a function with a name")
    named = fields.as_object(choice)
    if named is not None and named.get("name") not in [function["name"] for function in listed]:
        raise fields.invalid("function_call", f"must be 'auto', 'none' or one of the functions given, not {fields.preview(choice)}")
    tools = [{"type": "function", "function": function} for function in listed]
    wanted = choice if named is None else {"type": "function", "function": named}
    return {**body, "tools": tools, "tool_choice": wanted, "parallel_tool_calls": False}
