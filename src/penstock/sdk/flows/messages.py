"""Messages as flows write them: a row's whole prompt may stand where the text of one message would."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.records import Message

NOT_COLUMNS = frozenset({"raw_prompt", "uid", "prompt_uid", "trajectory_uid", "channel"})


def expanded(messages: Sequence[Message]) -> list[Message]:
    """With each message whose content is itself a list of messages replaced by those.

    >>> expanded([{"role": "user", "content": [{"role": "user", "content": "2+2?"}]}])
    [{'role': 'user', 'content': '2+2?'}]
    """
    return [inner for message in messages for inner in _inner(message)]


def prompt_of(kwargs: Mapping[str, Any]) -> list[Message]:
    """The row's prompt as messages, whichever way `raw_prompt` tells it; ValueError where the row asks nothing."""
    prompt = kwargs.get("raw_prompt")
    if not prompt:
        raise ValueError("the row has no prompt; fill its 'prompt' column, or write a flow that asks with other columns")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else expanded(cast("list[Message]", prompt))


def columns_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the row among what `run` is given: what a grader may want to know."""
    return {name: value for name, value in kwargs.items() if name not in NOT_COLUMNS}


def refuse_pictures(messages: Sequence[Message]) -> None:
    """ValueError where a message holds a part that is not text."""
    for message in expanded(messages):
        content: Any = message.get("content")
        parts = cast("list[Any]", content) if isinstance(content, list) else []
        for part in parts:
            kind = str(cast("Mapping[str, Any]", part).get("type", "text")) if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise ValueError(f"a message holds {kind!r}; the gateway takes text, leave pictures and videos out")


def _inner(message: Message) -> list[Message]:
    content: Any = message.get("content")
    if not isinstance(content, list) or not content:
        return [message]
    parts = cast("list[Any]", content)
    return cast("list[Message]", parts) if all(_is_message(part) for part in parts) else [message]


def _is_message(part: Any) -> bool:
    return isinstance(part, Mapping) and "role" in part and "content" in part
