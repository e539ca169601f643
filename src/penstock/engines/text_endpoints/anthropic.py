"""Anthropic-compatible endpoints: `/v1/messages`, streamed."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson

from penstock.engines.text_endpoints.base import TextReplyReader, TextRequest
from penstock.engines.text_endpoints.http import HttpTextEndpoint, TextEndpointSection
from penstock.errors import EngineError
from penstock.records import NO_LIMIT, Message, Sampling

API_VERSION = "2023-06-01"
DEFAULT_MAX_TOKENS = 8192
"""The API requires a limit; every model of the vendor's last years takes this one."""


class AnthropicSection(TextEndpointSection):
    """`[engine]` for `name = "anthropic"`."""

    vendor: ClassVar[str] = "https://api.anthropic.com"
    vendor_key: ClassVar[str] = "ANTHROPIC_API_KEY"

    def preflight(self, model: str) -> None:
        AnthropicEndpoint.preflight(self, model)


class AnthropicEndpoint(HttpTextEndpoint):
    path = "/messages"
    speaks = "messages"
    unknown_sampling = ("min_p", "seed")

    @classmethod
    def headers(cls, key: str) -> Mapping[str, str]:
        return {"anthropic-version": API_VERSION} | ({"x-api-key": key} if key else {})

    @classmethod
    def base(cls, section: TextEndpointSection) -> str:
        return f"{section.address.removesuffix('/v1')}/v1"

    def body(self, request: TextRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            **_conversation(request.messages),
            **_sampling_fields(request.sampling),
        }
        if request.tools:
            functions = [tool["function"] for tool in request.tools]
            offered = [
                each for each in functions if not request.allowed or each["name"] in request.allowed
            ]  # it has no such choice
            tools = [_tool(each, strict=each["name"] in request.strict) for each in offered]
            body |= {"tools": tools, "tool_choice": _tool_choice(request)}
        if request.format is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": request.format.schema or {"type": "object"}}}
        if request.dialect == "messages":
            return body | _as_sent(request.extra)
        named = _from_chat(request.extra)
        output: dict[str, Any] = {**body.get("output_config", {}), **named.pop("output_config", {})}
        return body | named | ({"output_config": output} if output else {})

    async def count_tokens(self, request: TextRequest) -> int:
        sampling = _sampling_fields(request.sampling)
        body = {name: value for name, value in self.body(request).items() if name not in ("stream", *sampling)}
        answer = await self.request_json("/count_tokens", body)
        tokens = answer.get("input_tokens")
        if not isinstance(tokens, int):
            raise EngineError(f"{self.model}: the endpoint counted without a number of tokens: {str(answer)[:100]}")
        return tokens

    def reader(self) -> "AnthropicReader":
        return AnthropicReader()


def open_engine(
    folder: Path, *, name: str, section: AnthropicSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> AnthropicEndpoint:
    return AnthropicEndpoint(name, section)


def _as_sent(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's fields, the conversation without what the API refuses: blocks of text that are empty, as ours may be."""
    if "messages" not in extra:
        return dict(extra)
    turns = [
        turn if isinstance(turn["content"], str) else {**turn, "content": _filled(turn["content"])} for turn in extra["messages"]
    ]
    return {**extra, "messages": [turn for turn in turns if turn["content"]]}


def _filled(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for block in blocks if block.get("type") != "text" or block["text"].strip()]


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    neutral = Sampling()
    values = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    fields: dict[str, Any] = {name: value for name, value in values.items() if value != getattr(neutral, name)}
    if sampling.stop:
        fields["stop_sequences"] = list(sampling.stop)
    limit = DEFAULT_MAX_TOKENS if sampling.max_tokens == NO_LIMIT else sampling.max_tokens
    return {"max_tokens": limit, **fields}


def _conversation(messages: Sequence[Message]) -> dict[str, Any]:
    """Leading system messages become the system prompt. Later ones and tool results become user turns, which the API requires."""
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
    system = "\n\n".join(text for message in messages[:head] if (text := _text(message)))
    return {"messages": turns} | ({"system": system} if system else {})


def _blocks(message: Message) -> list[dict[str, Any]]:
    """The content blocks of a message. The API refuses empty text blocks, so none is made."""
    content = message.get("content") or ""
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = [_block(part) for part in given if "text" not in part or part["text"].strip()]
    if message["role"] == "tool":
        result = content if isinstance(content, str) else blocks
        return [{"type": "tool_result", "tool_use_id": message.get("tool_call_id") or "", "content": result}]
    for call in message.get("tool_calls") or ():
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _input(call["function"])})
    return blocks


def _block(part: dict[str, Any]) -> dict[str, Any]:
    """A content part as a block. A part that the API does not know becomes a text that names it."""
    match part["type"]:
        case "text":
            return part
        case "image_url":
            return {"type": "image", "source": _source(part["image_url"]["url"])}
        case "file" if part["file"].get("file_data"):
            return {"type": "document", "source": _source(part["file"]["file_data"])}
        case kind:
            return {"type": "text", "text": f"[{kind} omitted: the endpoint does not take it]"}


def _source(url: str) -> dict[str, Any]:
    head, comma, data = url.partition(";base64,")
    if comma and head.startswith("data:"):
        return {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    return {"type": "file", "file_id": url.removeprefix("file:")} if url.startswith("file:") else {"type": "url", "url": url}


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(_block(part).get("text", "") for part in content)


def _from_chat(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the Chat API under the names of this one. The API refuses unknown fields, so the others are left out."""
    effort, user = extra.get("reasoning_effort"), extra.get("user")
    return ({"output_config": {"effort": effort}} if effort else {}) | ({"metadata": {"user_id": user}} if user else {})


def _input(function: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments as an object, which the API requires. Anything else is wrapped in one, so that the model sees it."""
    arguments: Any = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return {"unparsed": arguments}
    return arguments if isinstance(arguments, dict) else {"value": arguments}  # pyright: ignore[reportUnknownVariableType]


def _tool(function: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    description = {"description": function["description"]} if function.get("description") else {}
    return {
        "name": function["name"],
        **description,
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
        **({"strict": True} if strict else {}),
    }


def _tool_choice(request: TextRequest) -> dict[str, Any]:
    one = {"disable_parallel_tool_use": True} if request.one_call else {}
    if request.forced:
        return {"type": "tool", "name": request.forced, **one}
    if request.forced is None and not request.may_call:
        return {"type": "none"}
    return {"type": "auto" if request.forced is None else "any", **one}


class AnthropicReader(TextReplyReader):
    """Reads a message, streamed or whole."""

    def read(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self._set_usage(event["message"].get("usage") or {})
            case "content_block_start":
                self._begin_block(event["content_block"])
            case "content_block_delta":
                self._add_delta(event["delta"])
            case "message_delta":
                self._set_usage(event.get("usage") or {})
                if reason := event["delta"].get("stop_reason"):
                    self.set_finish(reason)
            case "message_stop":
                self.end()
            case "message":  # the endpoint does not stream
                for block in event["content"]:
                    self._begin_block(block)
                self._set_usage(event.get("usage") or {})
                self.set_finish(event["stop_reason"])
                self.end()
            case _:
                return

    def _begin_block(self, block: dict[str, Any]) -> None:
        match block["type"]:
            case "text":
                self.add_text(block.get("text"))
            case "thinking":
                self.add_reasoning(block.get("thinking"))
                self.add_signature(block.get("signature"))
            case "tool_use":
                self.begin_call(block.get("id"), block["name"])
                if block.get("input"):
                    self.add_arguments(orjson.dumps(block["input"]).decode())
            case _:
                return

    def _add_delta(self, delta: dict[str, Any]) -> None:
        match delta["type"]:
            case "text_delta":
                self.add_text(delta["text"])
            case "thinking_delta":
                self.add_reasoning(delta["thinking"])
            case "signature_delta":
                self.add_signature(delta["signature"])
            case "input_json_delta":
                self.add_arguments(delta["partial_json"])
            case _:
                return

    def _set_usage(self, usage: dict[str, Any]) -> None:
        """Prompt tokens read from or written to the endpoint's cache are reported apart; they count too."""
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        self.set_usage(prompt=sum(usage.get(name) or 0 for name in names), completion=usage.get("output_tokens"))
