"""Secrets out of what is kept as text: known values, and what looks like a key. Token ids are kept as they were sampled."""

import re
from collections.abc import Iterable
from typing import Any

from penstock.records import Message

PATTERNS = (
    r"\b(?:mk|ck|ak)-(?:[\w.-]+\.)?[0-9a-f]{40}\b",
    r"\bsk-[A-Za-z0-9_-]{20,}",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\bgh[pousr]_[A-Za-z0-9]{36,}\b",
    r"\bhf_[A-Za-z0-9]{30,}\b",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----",
)
"""What keys of common services, and our own tokens, look like."""

SIGNS = ("k-", "AKIA", "gh", "hf_", "xox", "PRIVATE KEY")
"""One of these is in whatever matches a pattern: most texts have none, and looking for them is cheap."""

REDACTED = "[redacted]"


class Redactor:
    """Takes secrets out of messages; `values` are known ones."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = sorted({value for value in values if len(value) >= 8}, key=len, reverse=True)
        self._signs = (*SIGNS, *known)
        self._secret = re.compile("|".join([*map(re.escape, known), *PATTERNS]))

    def message(self, message: Message) -> Message:
        """The message without secrets; the very same object where there were none."""
        return self._clean(message)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            suspect = any(sign in value for sign in self._signs)
            return self._secret.sub(REDACTED, value) if suspect and self._secret.search(value) else value
        if isinstance(value, dict):
            return self._same(value, {key: self._clean(item) for key, item in value.items()})  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list | tuple):
            return self._same(value, [self._clean(item) for item in value])  # pyright: ignore[reportUnknownVariableType]
        return value

    def _same(self, before: Any, after: Any) -> Any:
        items = zip(before.values(), after.values(), strict=True) if isinstance(before, dict) else zip(before, after, strict=True)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return before if all(one is other for one, other in items) else after  # pyright: ignore[reportUnknownVariableType]
