"""Redaction of secrets in stored text: known values, and what looks like a key. Token ids are kept as they were sampled."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from penstock.records import Message

PATTERNS = (
    r"\b(?:mk|fk|ck|ak)-(?:[\w.-]+\.)?[0-9a-f]{40}\b",
    r"\bpst_[A-Za-z0-9_-]{43}",
    r"\bsk-[A-Za-z0-9_-]{20,}",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\bgh[pousr]_[A-Za-z0-9]{36,}\b",
    r"\bhf_[A-Za-z0-9]{30,}\b",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----",
)
"""Keys of common services, and our own tokens."""

SIGNS = ("k-", "pst_", "AKIA", "gh", "hf_", "xox", "PRIVATE KEY")
"""Every match of a pattern contains one of these: most texts have none, and a search for them is cheap."""

REDACTED = "[redacted]"


class Redactor:
    """Removes secrets from messages; `values` are known ones."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = sorted({value for value in values if len(value) >= 8}, key=len, reverse=True)
        self._signs = tuple(orjson.dumps(sign)[1:-1] for sign in (*SIGNS, *known))
        self._secret = re.compile("|".join([*map(re.escape, known), *PATTERNS]))

    def message(self, message: Message) -> Message:
        """The message without secrets; the same object if nothing in it looks like one."""
        return message if self.is_clean(message) else self._clean(message)

    def is_clean(self, messages: Message | Sequence[Message]) -> bool:
        """Whether nothing in them looks like a secret."""
        text = orjson.dumps(messages)
        return not any(sign in text for sign in self._signs)

    def text(self, text: str) -> str:
        return self._secret.sub(REDACTED, text)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._secret.sub(REDACTED, value)
        if isinstance(value, dict):
            return {key: self._clean(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list | tuple):
            return [self._clean(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value
