"""What the gateway tests share: renderers over small tokenizers, and plain HTTP calls with their streams put together."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from penstock.chat.renderer import Renderer
from penstock.testing import CHATML, write_tokenizer

CORPUS = ['What is 6 times 7? The answer is 42. <tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>\n' * 40]
TOOL = {
    "type": "function",
    "function": {"name": "multiply", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
USER = {"role": "user", "content": "What is 6 times 7?"}


@cache
def renderer(*, merges: bool = True, template: str = CHATML) -> Renderer:
    with TemporaryDirectory() as folder:
        return Renderer.load(write_tokenizer(Path(folder), corpus=CORPUS if merges else (), vocab_size=420, template=template))


async def chat(http, *messages, headers=None, **fields):
    """POST a chat call; the response, its body put together if it was a stream."""
    body = {"model": "any", "messages": list(messages)} | fields
    return await http.post("/v1/chat/completions", content=json.dumps(body), headers=headers or {})


def events_of(response):
    """The events of a stream, `[DONE]` as a string."""
    parts = [part.removeprefix(b"data: ") for part in response.content.split(b"\n\n") if part]
    return [part.decode() if part == b"[DONE]" else orjson.loads(part) for part in parts]


def messages_of(response):
    """The assistant messages of an answer, by choice, whether it was streamed or not."""
    if response.headers["content-type"] == "application/json":
        return [choice["message"] for choice in response.json()["choices"]]
    found = {}
    for event in events_of(response):
        for choice in event["choices"] if isinstance(event, dict) else ():
            message = found.setdefault(choice["index"], {"role": "assistant", "content": ""})
            message["content"] += choice["delta"].get("content") or ""
            if choice["delta"].get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + choice["delta"]["reasoning_content"]
            for call in choice["delta"].get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    calls.append({key: value for key, value in call.items() if key != "index"})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for message in found.values():
        if "tool_calls" in message:
            message["content"] = message["content"] or None
    return [found[index] for index in sorted(found)]
