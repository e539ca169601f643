"""Content parts that are not text: what a text model reads in their place, and what is recorded of them."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, cast

from penstock.records import Message

MEDIA = {"image_url": "image", "input_audio": "audio", "video_url": "video", "file": "document"}
"""Types of such parts in the OpenAI form, with the word for each."""
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-yaml")
"""Media types of documents that are read as text."""


def placeholder(part: dict[str, Any]) -> str:
    """What a text model reads in place of the part. It is the same for all images, so that a path does not depend on them."""
    name: Any = part["file"].get("filename") if part["type"] == "file" else None
    named = f" {name}" if isinstance(name, str) and name else ""
    return f"[{MEDIA[part['type']]}{named} omitted: this model reads text only]"


def media_of(messages: Iterable[Message]) -> list[str]:
    """The word for each part of the messages that is not text."""
    return [MEDIA[part["type"]] for message in messages for part in _parts(message) if part["type"] in MEDIA]


def decoded_text(media_type: str, data: str) -> str | None:
    """The text of a base64 document; None if it is of a type that is not text."""
    if not media_type.startswith(TEXT_TYPES):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def text_of_url(url: str) -> str | None:
    """The text of a `data:` URL; None if it is of another kind."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    return decoded_text(head.removeprefix("data:").removesuffix(";base64"), data)


def as_text(message: Message) -> Message:
    """The message as a text model gets it; the same object if its content is text."""
    return {**message, "content": "\n".join(_texts(message))} if isinstance(message.get("content"), list) else message


def without_bytes(message: Message) -> Message:
    """The message with a digest in place of the bytes that its parts hold; the same object if there are none."""
    parts = _parts(message)
    if all(part["type"] not in MEDIA for part in parts):
        return message
    return {**message, "content": [_digested(part) for part in parts]}


def _texts(message: Message) -> Iterable[str]:
    return (part["text"] if "text" in part else placeholder(part) for part in _parts(message))


def _parts(message: Message) -> Sequence[dict[str, Any]]:
    content = message.get("content")
    return cast("list[dict[str, Any]]", content) if isinstance(content, list) else ()


def _digested(value: Any) -> Any:
    """Replaces `data:` URLs and long base64 texts."""
    if isinstance(value, dict):
        return {key: _digested(item) if key not in ("type", "text") else item for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str) and (value.startswith("data:") or len(value) > 1000):
        return f"sha256:{sha256(value.encode()).hexdigest()}"
    return value
