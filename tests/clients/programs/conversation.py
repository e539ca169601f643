"""What every client program does: ask two questions that need a tool, and tell its own view of the messages at the end.

A view is a list of `[role, text, calls]`, where a call is `[name, arguments]`: the same in every API, so that it can be held
against the gateway's record.
"""

import json
import sys

INSTRUCTIONS = "You add numbers with the add tool."
QUESTIONS = ("What is 2 plus 3?", "And 10 plus 20, and 7 plus 8?")
MODEL = "scripted"
STREAMS = sys.argv[1] == "stream"
DIALECT = sys.argv[2]

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def answer(arguments):
    """The tool's result, as text, for arguments in JSON or already read."""
    return str(add(**(json.loads(arguments) if isinstance(arguments, str) else arguments)))


def text_of(content):
    """The text of a message's content: nothing, a string, or a list of blocks."""
    if isinstance(content, str) or not content:
        return content or ""
    return "".join(block.get("text") or "" for block in content)


def tell(view, pieces=None):
    """Print the view; with `pieces`, also how many the longest streamed reply came in."""
    print(json.dumps({"view": view, "pieces": pieces}))
