"""An agent that knows nothing of penstock: its task comes on stdin, its model by OPENAI_BASE_URL and OPENAI_API_KEY.

It needs Python and no packages. Any program in any language that speaks the OpenAI or the Anthropic API could stand here.
"""

import json
import os
import sys
import urllib.request
from typing import Any

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def worked(a: int, b: int) -> list[dict[str, Any]]:
    """A whole exchange as the agent should have it: question, call, result, answer."""
    call = {"id": f"call_{a}_{b}", "type": "function", "function": {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}}
    return [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def ask(messages: list[Any], max_tokens: int) -> Any:
    """The model's reply, as a message."""
    body = {"model": "policy", "messages": messages, "tools": [MULTIPLY], "max_tokens": max_tokens}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def product(call: Any) -> int | None:
    """What the tool gives; None for another tool or arguments that it does not take."""
    if call["type"] != "function" or call["function"]["name"] != "multiply":
        return None
    try:
        arguments = json.loads(call["function"]["arguments"])
        a, b = arguments["a"], arguments["b"]
    except (ValueError, TypeError, KeyError):
        return None
    return a * b if type(a) is int and type(b) is int else None


def main() -> None:
    task = json.load(sys.stdin)
    config = task["config"]  # [workflow] of train.toml
    examples = [*worked(7, 8), *worked(23, 41)] if config.get("show_examples", True) else []
    messages = [*examples, *task["prompt"]]
    for _ in range(config.get("max_turns", 2)):
        reply = ask(messages, config.get("max_tokens", 40))
        calls: list[Any] = reply.get("tool_calls") or []
        results = [(call["id"], product(call)) for call in calls]
        if not results or any(result is None for _, result in results):
            return  # the policy's last word: the grader judges it
        messages.append(reply)
        messages += [{"role": "tool", "tool_call_id": name, "content": str(result)} for name, result in results]


main()
