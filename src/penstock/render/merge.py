"""Conversations for templates that are strict about turns: said with fewer messages, nothing left out.

Coding agents open with several system messages, put others in the middle and let users speak twice in a row. Most templates
take that as it is; some refuse it, and get it in the form that they take.
"""

from collections.abc import Iterator, Sequence

from penstock.records import Message
from penstock.render.chat import flatten

BETWEEN = "\n\n"


def milder(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Forms of the conversation that a strict template may take: first with one system message, then with none."""
    yield _joined(_one_system(messages))
    yield _joined([_as_user(message) for message in messages])


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """System messages at the head as they are, later ones as the user's."""
    head = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*messages[:head], *map(_as_user, messages[head:])]


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Several messages of the system or of the user in a row as one."""
    joined: list[Message] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] and message["role"] in ("system", "user"):
            text = BETWEEN.join([flatten(joined[-1].get("content")), flatten(message.get("content"))])
            joined[-1] = {**joined[-1], "content": text}
        else:
            joined.append(message)
    return joined
