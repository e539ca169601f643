"""What the scripted model says to each client: functions of the prompt's text, so that any history gets a fitting reply."""

import json
import re
from collections.abc import Callable

from penstock.testing import ScriptedReply

Script = Callable[[str], str | ScriptedReply]
"""The prompt as text → the reply, tool calls in the Hermes form."""


def call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def adder(prompt: str) -> str:
    """Adds with the tool `add`: says something before a single call and nothing before several, then tells the sums."""
    turn = last_turn(prompt)
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn, re.DOTALL)
    if results:
        return f"The sum is {results[0]} ✓" if len(results) == 1 else f"The sums are {' and '.join(results)}."
    pairs = re.findall(r"(\d+) plus (\d+)", turn)
    calls = "\n".join(call("add", a=int(a), b=int(b)) for a, b in pairs)
    return f"Let me add: naïve, but sure…\n{calls}" if len(pairs) == 1 else calls


def in_turns(*replies: str) -> Script:
    """The first reply to the task, the next to each result: by how many results the prompt holds."""

    def reply(prompt: str) -> str:
        return replies[min(prompt.count("<tool_response>\n"), len(replies) - 1)]

    return reply


def last_turn(prompt: str) -> str:
    return prompt.rpartition("<|im_start|>user\n")[2]


def thinking(script: Script) -> Script:
    """The same replies, each after a thought."""
    return lambda prompt: f"<think>\nThis is easy.\n</think>\n\n{script(prompt)}"


def busy_first(script: Script) -> Script:
    """The same replies, after the first request found no room."""
    turned_away: list[str] = []

    def reply(prompt: str) -> str | ScriptedReply:
        if turned_away:
            return script(prompt)
        turned_away.append(prompt)
        return ScriptedReply(busy=True)

    return reply


def person(prompt: str) -> str:
    """A person as JSON, or as a call of the tool that asks for one; a call that the prompt begins is gone on with."""
    value = {"name": "Ada", "age": 36}
    begun = last_turn(prompt).rpartition("<|im_start|>assistant\n")[2]
    if "<tool_call>" in begun:
        text = call(_person_tool(prompt), **value)
        return text[len(begun.rstrip()) :] if text.startswith(begun.rstrip()) else text.removeprefix("<tool_call>\n")
    return call(tool, **value) if (tool := _person_tool(prompt)) else json.dumps(value)


def _person_tool(prompt: str) -> str:
    offered = re.findall(r'"name": "(Person|person|final_result|format_final_json_response|set_model_response|json)"', prompt)
    return offered[0] if offered else ""
