"""OpenAI-compatible endpoints: `/chat/completions`, streamed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import orjson

from penstock.engines.text_endpoints.base import TextReplyReader, TextRequest
from penstock.engines.text_endpoints.http import HttpTextEndpoint, TextEndpointSection
from penstock.records import NO_LIMIT, Message, ReplyFormat, Sampling


class OpenAISection(TextEndpointSection):
    """`[engine]` for `name = "openai"`."""

    vendor: ClassVar[str] = "https://api.openai.com/v1"
    vendor_key: ClassVar[str] = "OPENAI_API_KEY"

    def preflight(self, model: str) -> None:
        OpenAIEndpoint.preflight(self, model)


class OpenAIEndpoint(HttpTextEndpoint):
    path = "/chat/completions"

    @classmethod
    def headers(cls, key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}

    @classmethod
    def base(cls, section: TextEndpointSection) -> str:
        """An address without a path gets `/v1`, where all such servers have the API."""
        return section.address if urlsplit(section.address).path else f"{section.address}/v1"

    def body(self, request: TextRequest) -> dict[str, Any]:
        return {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | chat_request(
            request, limit=self._limit
        )

    def reader(self) -> "OpenAIReader":
        return OpenAIReader()

    @property
    def _limit(self) -> str:
        """OpenAI's newer models refuse `max_tokens`, and most other servers know no other name."""
        return "max_completion_tokens" if self._section.address == OpenAISection.vendor else "max_tokens"


def open_engine(
    folder: Path, *, name: str, section: OpenAISection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> OpenAIEndpoint:
    return OpenAIEndpoint(name, section)


def chat_request(request: TextRequest, *, limit: str) -> dict[str, Any]:
    """The messages, tools and sampling settings. Defaults are not sent: some models refuse even those."""
    sampling, neutral = request.sampling, Sampling()
    body: dict[str, Any] = {"messages": [_message(message) for message in request.messages]}
    if sampling.max_tokens != NO_LIMIT:
        body[limit] = sampling.max_tokens
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if getattr(sampling, name) != getattr(neutral, name):
            body[name] = getattr(sampling, name)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if request.tools:
        body["tools"] = [_tool(tool, request.strict) for tool in request.tools]
        body["tool_choice"] = _tool_choice(request)
        body |= {"parallel_tool_calls": False} if request.one_call else {}
    if request.format is not None:
        body["response_format"] = _response_format(request.format)
    return body | (dict(request.extra) if request.dialect == "chat" else _from_messages(request.extra))


def _from_messages(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the Messages API under the names of this one."""
    output, metadata = extra.get("output_config"), extra.get("metadata")
    effort: Any = output.get("effort") if output else None
    user: Any = metadata.get("user_id") if metadata else None
    named: dict[str, Any] = {"reasoning_effort": effort, "user": user}
    return {name: value for name, value in named.items() if value}


def _tool(tool: dict[str, Any], strict: frozenset[str]) -> dict[str, Any]:
    function = tool["function"]
    return {**tool, "function": {**function, "strict": True}} if function["name"] in strict else tool


def _response_format(form: ReplyFormat) -> dict[str, Any]:
    if form.schema is None:
        return {"type": "json_object"}
    described = {"description": form.description} if form.description else {}
    return {"type": "json_schema", "json_schema": {"name": form.name, **described, "schema": form.schema, "strict": form.strict}}


def _tool_choice(request: TextRequest) -> Any:
    if request.forced:
        return {"type": "function", "function": {"name": request.forced}}
    mode = "required" if request.forced is not None else "auto" if request.may_call else "none"
    if not request.allowed:
        return mode
    named = [{"type": "function", "function": {"name": name}} for name in sorted(request.allowed)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _message(message: Message) -> Message:
    """The message without its reasoning, which endpoints refuse or ignore, and with arguments as JSON text."""
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**call, "function": _function(call["function"])} for call in calls]
    return plain


def _function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": (arguments or "{}") if isinstance(arguments, str) else orjson.dumps(arguments).decode()}


class OpenAIReader(TextReplyReader):
    """Reads a chat completion, streamed or whole. A stream ends with `[DONE]`, after the token counts."""

    def __init__(self) -> None:
        super().__init__()
        self._call: tuple[int, str] | None = None
        """Index and id of the last call."""

    def read(self, event: dict[str, Any]) -> None:
        if usage := event.get("usage"):
            self.set_usage(prompt=usage.get("prompt_tokens"), completion=usage.get("completion_tokens"))
        for choice in event["choices"][:1]:
            self._add_delta(choice.get("delta") or choice.get("message") or {})
            if reason := choice.get("finish_reason"):
                self.set_finish(reason)
            if "message" in choice:  # the endpoint does not stream
                self.end()

    def _add_delta(self, delta: dict[str, Any]) -> None:
        self.add_reasoning(delta.get("reasoning_content") or delta.get("reasoning"))
        self.add_text(delta.get("content"))
        self.add_text(delta.get("refusal"))
        for part in delta.get("tool_calls") or ():
            function: dict[str, Any] = part.get("function") or {}
            index, call_id = part.get("index") or 0, part.get("id") or ""
            if self._call is None or index != self._call[0] or (call_id and call_id != self._call[1]):
                self._call = (index, call_id)
                self.begin_call(call_id, function.get("name") or "")
            self.add_arguments(function.get("arguments"))
