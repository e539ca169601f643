"""Anthropic-compatible endpoints: `/v1/messages`, streamed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson

from penstock.engines.text_endpoints.base import TextReplyReader, TextRequest
from penstock.engines.text_endpoints.http import HttpTextEndpoint, TextEndpointSection
from penstock.errors import RequestError
from penstock.records import Message, Sampling

API_VERSION = "2023-06-01"
"""Of the API."""


class AnthropicSection(TextEndpointSection):
    """`[engine]` for `name = "anthropic"`."""

    vendor: ClassVar[str] = "https://api.anthropic.com"
    vendor_key: ClassVar[str] = "ANTHROPIC_API_KEY"

    def preflight(self, model: str) -> None:
        AnthropicEndpoint.preflight(self, model)


class AnthropicEndpoint(HttpTextEndpoint):
    path = "/messages"

    @classmethod
    def headers(cls, key: str) -> Mapping[str, str]:
        return {"anthropic-version": API_VERSION} | ({"x-api-key": key} if key else {})

    @classmethod
    def base(cls, section: TextEndpointSection) -> str:
        return f"{section.address.removesuffix('/v1')}/v1"

    def body(self, asked: TextRequest) -> dict[str, Any]:
        body = {"model": self.model, "stream": True, **_conversation(asked.messages), **_sampled(asked.sampling)}
        if asked.tools:
            body |= {"tools": [_tool(each["function"]) for each in asked.tools], "tool_choice": _choice(asked)}
        return body

    def reader(self) -> "AnthropicReader":
        return AnthropicReader()


def open_engine(
    folder: Path, *, name: str, section: AnthropicSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> AnthropicEndpoint:
    """The relay; of an engine's arguments, only its name and settings have a meaning here."""
    return AnthropicEndpoint(name, section)


def _sampled(sampling: Sampling) -> dict[str, Any]:
    neutral = Sampling()
    for name in ("min_p", "seed"):
        if getattr(sampling, name) != getattr(neutral, name):
            text = f"{name}: an Anthropic endpoint has no such setting; leave it out"
            raise RequestError(text, code="unsupported_parameter", param=name)
    told = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    asked: dict[str, Any] = {name: value for name, value in told.items() if value != getattr(neutral, name)}
    if sampling.stop:
        asked["stop_sequences"] = list(sampling.stop)
    return {"max_tokens": sampling.max_tokens, **asked}


def _conversation(messages: Sequence[Message]) -> dict[str, Any]:
    """System messages at the head are the system prompt; one further on is told as the user's word, as are results of tools."""
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    turns: list[dict[str, Any]] = []
    for message in messages[head:]:
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _blocks(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    system = "\n\n".join(text for message in messages[:head] if (text := message.get("content") or ""))
    return {"messages": turns} | ({"system": system} if system else {})


def _blocks(message: Message) -> list[dict[str, Any]]:
    """What a message says; a block of no text is refused, so that there is none."""
    text = message.get("content") or ""
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message.get("tool_call_id") or "", "content": text}]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text.strip() else []
    for call in message.get("tool_calls") or ():
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _input(call["function"])})
    return blocks


def _input(function: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments as the object that is asked for; what a model wrote instead stands in one, so that it sees it again."""
    given: Any = function["arguments"]
    if isinstance(given, str):
        try:
            given = orjson.loads(given or "{}")
        except orjson.JSONDecodeError:
            return {"unparsed": given}
    return given if isinstance(given, dict) else {"value": given}  # pyright: ignore[reportUnknownVariableType]


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    about = {"description": function["description"]} if function.get("description") else {}
    return {"name": function["name"], **about, "input_schema": function.get("parameters") or {"type": "object", "properties": {}}}


def _choice(asked: TextRequest) -> dict[str, Any]:
    if asked.forced:
        return {"type": "tool", "name": asked.forced}
    return {"type": "any" if asked.forced is not None else "auto" if asked.may_call else "none"}


class AnthropicReader(TextReplyReader):
    """Reads the events of a message, or one that comes whole."""

    def read(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self._count(event["message"].get("usage") or {})
            case "content_block_start":
                self._begin(event["content_block"])
            case "content_block_delta":
                self._grow(event["delta"])
            case "message_delta":
                self._count(event.get("usage") or {})
                if reason := event["delta"].get("stop_reason"):
                    self.stop(reason)
            case "message_stop":
                self.end()
            case "message":  # the endpoint does not stream
                for block in event["content"]:
                    self._begin(block)
                self._count(event.get("usage") or {})
                self.stop(event["stop_reason"])
                self.end()
            case _:
                return

    def _begin(self, block: dict[str, Any]) -> None:
        match block["type"]:
            case "text":
                self.say(block.get("text"))
            case "thinking":
                self.think(block.get("thinking"))
            case "tool_use":
                self.call(block.get("id"), block["name"])
                if block.get("input"):
                    self.argue(orjson.dumps(block["input"]).decode())
            case _:
                return

    def _grow(self, delta: dict[str, Any]) -> None:
        match delta["type"]:
            case "text_delta":
                self.say(delta["text"])
            case "thinking_delta":
                self.think(delta["thinking"])
            case "input_json_delta":
                self.argue(delta["partial_json"])
            case _:
                return

    def _count(self, used: dict[str, Any]) -> None:
        """Tokens that were read from a cache count as read."""
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        self.count(prompt=sum(used.get(name) or 0 for name in names), completion=used.get("output_tokens"))
