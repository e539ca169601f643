"""The OpenAI Responses dialect: `/v1/responses`, and `/v1/responses/input_tokens` that only counts."""

from collections.abc import Iterator
from typing import Any

import orjson

from penstock.chat.templates import Tool
from penstock.errors import RequestError
from penstock.gateway.calls import Call, Past
from penstock.gateway.dialects import fields, responses_input, responses_output, responses_tools
from penstock.gateway.dialects.base import Answer, Spelling
from penstock.gateway.dialects.chat import error_body
from penstock.gateway.dialects.responses_events import ResponseEvents
from penstock.gateway.dialects.sampling import SAMPLING, refuse, sampling, unsupported
from penstock.records import Sampling

HONOURED = SAMPLING | frozenset(
    {"model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "stream", "max_output_tokens"}
    | {"include", "parallel_tool_calls", "reasoning", "text", "truncation"}
)
"""The last row's are read in part; `_unmet` names the rest."""

LABELS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "client_metadata", "stream_options", "max_tool_calls"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)
"""Fields that say who asks, how to keep the answer, or what only a vendor's tools would do; sampling does not depend on them."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "n": (1,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
"""Fields that would change the answer in a way that is not offered, with the values that change nothing."""

ECHOED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""What the response object repeats of the request, with the value of what was left out."""

LOGPROBS = "message.output_text.logprobs"


class ResponsesDialect:
    """See `Dialect`."""

    path = "/v1/responses"
    count_path = "/v1/responses/input_tokens"
    ping = b": still sampling\n\n"

    def __init__(self, tokenizer: Spelling) -> None:
        self._tokenizer = tokenizer

    def parse(self, body: dict[str, Any], defaults: Sampling, past: Past) -> Call:
        """See `Dialect.parse`."""
        refuse(body, NEUTRAL)
        _check_format(body)
        tools = past.talk.tools(body.get("tools"), responses_tools.offered)
        model = body.get("model", "")
        return Call(
            model=model if isinstance(model, str) else "",
            messages=responses_input.messages(body, past),
            sampling=sampling(body, defaults, "max_output_tokens"),
            tools=tools,
            reads_calls=bool(tools) and body.get("tool_choice") != "none",
            forced=_forced(body.get("tool_choice"), tools),
            stream=fields.flag(body, "stream"),
            logprobs=LOGPROBS in _included(body),
            echo=tuple((name, body[name] if body.get(name) is not None else other) for name, other in ECHOED.items()),
            ignored=tuple(sorted(set(_unmet(body)))),
        )

    def whole(self, answer: Answer) -> bytes:
        """See `Dialect.whole`."""
        (step,) = answer.steps
        known = responses_tools.addresses(dict(answer.call.echo).get("tools"))
        items = responses_output.items_of(answer, step, known, self._tokenizer)
        return orjson.dumps(responses_output.finished(answer, step, items, self._tokenizer))

    def events(self, answer: Answer) -> ResponseEvents:
        """See `Dialect.events`."""
        return ResponseEvents(answer, self._tokenizer)

    def count(self, tokens: int) -> dict[str, Any]:
        """See `Dialect.count`."""
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def error(self, error: RequestError) -> dict[str, Any]:
        """See `Dialect.error`."""
        return error_body(error)

    def broken(self, error: RequestError) -> bytes:
        """See `Dialect.broken`. The error stands in it twice: as the API documents the event, and where its SDKs look."""
        told = error_body(error)["error"]
        body = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"], "sequence_number": 0}
        return b"event: error\ndata: " + orjson.dumps(body | {"error": told}) + b"\n\n"


def _check_format(body: dict[str, Any]) -> None:
    text = _object(body, "text")
    form = _object(text, "format", "text.format")
    if text.get("format") is not None and form.get("type") != "text":
        raise unsupported("text.format", form)


def _included(body: dict[str, Any]) -> list[str]:
    named = fields.entries([] if body.get("include") is None else body["include"])
    if named is None or not all(isinstance(each, str) for each in named):
        raise fields.wrong("include", "must be a list of names")
    return named


def _forced(choice: Any, tools: tuple[Tool, ...]) -> str | None:
    """The tool that must be called, by the name that the model knows it by."""
    named = fields.entry(choice) or {}
    if isinstance(named.get("namespace"), str) and isinstance(named.get("name"), str):
        choice = {"name": responses_tools.joined(named["name"], named["namespace"])}
    return fields.choice(choice, tools)


def _unmet(body: dict[str, Any]) -> Iterator[str]:
    """What was asked for and is not done."""
    given = {name for name, value in body.items() if value is not None}
    yield from given - HONOURED - LABELS - NEUTRAL.keys()
    yield from responses_tools.unmet(body.get("tools"))
    yield from (f"include:{name}" for name in _included(body) if name != LOGPROBS)
    yield from (f"reasoning.{name}" for name, value in _object(body, "reasoning").items() if value is not None)
    yield from (f"text.{name}" for name, value in _object(body, "text").items() if name != "format" and value is not None)
    if body.get("truncation") not in (None, "disabled"):
        yield "truncation"
    if body.get("parallel_tool_calls") is not None and not fields.flag(body, "parallel_tool_calls"):
        yield "parallel_tool_calls"


def _object(body: dict[str, Any], name: str, shown: str = "") -> dict[str, Any]:
    value = fields.entry({} if body.get(name) is None else body[name])
    if value is None:
        raise fields.wrong(shown or name, "must be an object")
    return value
