"""OpenAI-compatible endpoints: `/chat/completions`, streamed, with the counts of tokens at its end."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import orjson

from penstock.engines.text_endpoints.base import TextReplyReader, TextRequest
from penstock.engines.text_endpoints.http import HttpTextEndpoint, TextEndpointSection
from penstock.records import Message, Sampling


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
        """See `HttpRelay.base`: an address without any path gets `/v1`, where all such servers have it."""
        return section.address if urlsplit(section.address).path else f"{section.address}/v1"

    def body(self, asked: TextRequest) -> dict[str, Any]:
        return {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | chat_request(
            asked, limit=self._limit
        )

    def reader(self) -> "OpenAIReader":
        return OpenAIReader()

    @property
    def _limit(self) -> str:
        """The vendor has renamed the field, and its newer models refuse the old name, the only one that most others know."""
        own = self._section.address == OpenAISection.vendor
        return "max_completion_tokens" if own else "max_tokens"


def open_engine(
    folder: Path, *, name: str, section: OpenAISection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> OpenAIEndpoint:
    """The relay; of an engine's arguments, only its name and settings have a meaning here."""
    return OpenAIEndpoint(name, section)


def chat_request(asked: TextRequest, *, limit: str) -> dict[str, Any]:
    """The conversation and how its reply is sampled. What says nothing new is not sent: some models refuse to be told."""
    sampling, neutral = asked.sampling, Sampling()
    body: dict[str, Any] = {"messages": [_message(each) for each in asked.messages], limit: sampling.max_tokens}
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if getattr(sampling, name) != getattr(neutral, name):
            body[name] = getattr(sampling, name)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if asked.tools:
        body["tools"] = list(asked.tools)
        body["tool_choice"] = _choice(asked)
    return body


def _choice(asked: TextRequest) -> Any:
    if asked.forced:
        return {"type": "function", "function": {"name": asked.forced}}
    return "required" if asked.forced is not None else "auto" if asked.may_call else "none"


def _message(message: Message) -> Message:
    """Without its reasoning, which endpoints refuse or ignore; arguments as JSON text."""
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**call, "function": _function(call["function"])} for call in calls]
    return plain


def _function(function: dict[str, Any]) -> dict[str, Any]:
    given = function["arguments"]
    return {**function, "arguments": (given or "{}") if isinstance(given, str) else orjson.dumps(given).decode()}


class OpenAIReader(TextReplyReader):
    """Reads the chunks of a chat completion, or one that comes whole. A stream ends with `[DONE]`, after its counts."""

    def __init__(self) -> None:
        super().__init__()
        self._call: tuple[int, str] | None = None
        """Place and id of the call that began last."""

    def read(self, event: dict[str, Any]) -> None:
        if used := event.get("usage"):
            self.count(prompt=used.get("prompt_tokens"), completion=used.get("completion_tokens"))
        for choice in event["choices"][:1]:
            self._grow(choice.get("delta") or choice.get("message") or {})
            if reason := choice.get("finish_reason"):
                self.stop(reason)
            if "message" in choice:  # the endpoint does not stream
                self.end()

    def _grow(self, delta: dict[str, Any]) -> None:
        self.think(delta.get("reasoning_content") or delta.get("reasoning"))
        self.say(delta.get("content"))
        self.say(delta.get("refusal"))
        for part in delta.get("tool_calls") or ():
            function: dict[str, Any] = part.get("function") or {}
            place, call_id = part.get("index") or 0, part.get("id") or ""
            if self._call is None or place != self._call[0] or (call_id and call_id != self._call[1]):
                self._call = (place, call_id)
                self.call(call_id, function.get("name") or "")
            self.argue(function.get("arguments"))
