"""Content parts that are not text: what a text model reads in their place, and what is recorded of them."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, cast

from penstock.records import Message

PICTURE = "picture"
"""Type of a part that stands for a picture which the model sees: it has a digest and a media type, and no bytes."""
MEDIA = {"image_url": "image", "input_audio": "audio", "video_url": "video", "file": "document"}
"""Types of such parts in the OpenAI form, with the word for each."""
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-yaml")
"""Media types of documents that are read as text."""


class Picture(NamedTuple):
    """A picture as a caller sent it."""

    media_type: str
    content: bytes
    digest: str
    """SHA-256 of the content."""

    @classmethod
    def of(cls, media_type: str, content: bytes) -> "Picture":
        return cls(media_type, content, sha256(content).hexdigest())

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.content).decode()}"


def read_picture(part: dict[str, Any]) -> Picture | None:
    """The picture of a part that holds its bytes; None for any other part, and for a picture that lies elsewhere."""
    if part["type"] != "image_url":
        return None
    head, _, data = part["image_url"]["url"].partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        return None
    try:
        return Picture.of(head.removeprefix("data:").removesuffix(";base64"), base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return None


def pictures_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The parts that stand for pictures which the model sees, in their order."""
    return [part for message in messages for part in parts_of(message) if part["type"] == PICTURE]


def placeholder(part: dict[str, Any]) -> str:
    """What a text model reads in place of the part. It is the same for all images, so that a path does not depend on them.

    A picture that the model sees has its digest here, by which its message is recognized.
    """
    if part["type"] == PICTURE:
        return f"[image sha256:{part['digest']}]"
    name: Any = part["file"].get("filename") if part["type"] == "file" else None
    named = f" {name}" if isinstance(name, str) and name else ""
    return f"[{MEDIA[part['type']]}{named} omitted: this model reads text only]"


def media_of(messages: Iterable[Message]) -> list[str]:
    """The word for each part of the messages that is not text."""
    return [MEDIA[part["type"]] for message in messages for part in parts_of(message) if part["type"] in MEDIA]


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
    """The message as the model gets it: of parts that are not text, pictures alone. The same object if its content is text."""
    parts = parts_of(message)
    if any(part["type"] == PICTURE for part in parts):
        return {**message, "content": [part if part["type"] == PICTURE else text_part(part) for part in parts]}
    return {**message, "content": "\n".join(_texts(message))} if isinstance(message.get("content"), list) else message


def text_part(part: dict[str, Any]) -> dict[str, Any]:
    return part if "text" in part else {"type": "text", "text": placeholder(part)}


def joined(*contents: Any) -> Any:
    """Contents of messages one after the other: a list of parts if one of them has pictures, else text."""
    parts = [part for content in contents for part in _as_parts(content)]
    return parts if any(part["type"] == PICTURE for part in parts) else "".join(part["text"] for part in parts)


def without_bytes(message: Message) -> Message:
    """The message with a digest in place of the bytes that its parts hold; the same object if there are none."""
    parts = parts_of(message)
    if all(part["type"] not in MEDIA for part in parts):
        return message
    return {**message, "content": [_digested(part) for part in parts]}


def _as_parts(content: Any) -> Sequence[dict[str, Any]]:
    if isinstance(content, str) or content is None:
        return [{"type": "text", "text": content or ""}]
    message = as_text({"content": content})
    return parts_of(message) or _as_parts(message["content"])


def _texts(message: Message) -> Iterable[str]:
    return (part["text"] if "text" in part else placeholder(part) for part in parts_of(message))


def parts_of(message: Message) -> Sequence[dict[str, Any]]:
    """The parts of a message whose content is a list; none of one that is text."""
    content = message.get("content")
    return cast("list[dict[str, Any]]", content) if isinstance(content, list) else ()


def _digested(value: Any) -> Any:
    """Replaces `data:` URLs and long base64 texts."""
    if isinstance(value, dict):
        return {key: _digested(item) if key not in ("type", "text") else item for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str) and (value.startswith("data:") or len(value) > 1000):
        return f"sha256:{sha256(value.encode()).hexdigest()}"
    return value
