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
    """Adds with the tool `add`: says something before a single call and nothing before several, then reports the sums."""
    turn = last_turn(prompt)
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn, re.DOTALL)
    if results:
        return f"The sum is {results[0]} ✓" if len(results) == 1 else f"The sums are {' and '.join(results)}."
    pairs = re.findall(r"(\d+) plus (\d+)", turn)
    calls = "\n".join(call("add", a=int(a), b=int(b)) for a, b in pairs)
    return f"Let me add: naïve, but sure…\n{calls}" if len(pairs) == 1 else calls


def speaker(prompt: str) -> str:
    """Adds without a tool."""
    pairs = re.findall(r"(\d+) plus (\d+)", last_turn(prompt))
    return f"The sums are {' and '.join(str(int(a) + int(b)) for a, b in pairs)}."


def finisher(prompt: str) -> str:
    """As `adder`, for smolagents, whose agents end by the tool `final_answer`: in calls, in code, or in code inside JSON."""
    results = re.findall(r"Observation:\n(?:Execution logs:\n)?(\d+)", prompt)
    if '"name": "final_answer"' in prompt:
        text = call("final_answer", answer=f"The sum is {results[-1]}") if results else call("add", a=2, b=3)
        return text.removeprefix(last_turn(prompt).rpartition("<|im_start|>assistant\n")[2].rstrip())
    code = f"final_answer('The sum is {results[-1]}')" if results else "print(add(a=2, b=3))"
    if '"thought"' in prompt:
        return json.dumps({"thought": "This is easy.", "code": code})
    return f"Thought: This is easy.\n<code>\n{code}\n</code>"


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
    begun = last_turn(prompt).rpartition("<|im_start|>assistant\n")[2].rstrip()
    named = re.search(r'"name": "(\w+)"', begun)
    tool = named[1] if named else _person_tool(prompt)
    text = call(tool, **PERSON) if tool else _person_text(prompt)
    return text.removeprefix(begun)


PERSON = {"name": "Ada", "age": 36}


def _person_tool(prompt: str) -> str:
    """The offered tool that takes a name and an age."""
    lines = [line for line in prompt.splitlines() if line.startswith('{"type": "function"')]
    offered = [json.loads(line)["function"] for line in lines]
    return next((each["name"] for each in offered if PERSON.keys() <= each["parameters"].get("properties", {}).keys()), "")


def _person_text(prompt: str) -> str:
    if "JSON object in the following order of fields: `person`" in prompt:  # dspy's JSON adapter
        return json.dumps({"person": PERSON})
    if "[[ ## completed ## ]]" in prompt:  # dspy's chat adapter
        return f"[[ ## person ## ]]\n{json.dumps(PERSON)}\n\n[[ ## completed ## ]]"
    return json.dumps(PERSON)
