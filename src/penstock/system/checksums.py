"""Checksums that tell damaged files: of whole files, and of JSON objects that carry their own."""

import hashlib
import re
from pathlib import Path

_ENTRY = re.compile(rb',"checksum":"([0-9a-f]{16})"\}\n?$')


def file_checksum(path: Path) -> str:
    """SHA-256, in hexadecimal as `sha256sum` prints it. Threads run it in parallel."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def add_checksum(text: bytes, key: str = "") -> bytes:
    """Add a last entry `checksum` to a JSON object that is not empty; with another `key` it would be another one."""
    head = text.rstrip()[:-1]
    return b'%b,"checksum":"%b"}' % (head, _checksum(head, key))


def remove_checksum(text: bytes, key: str = "") -> bytes:
    """Undo `add_checksum`; ValueError if the checksum does not match. Text without one is returned as it is."""
    found = _ENTRY.search(text)
    if found is None:
        return text
    head = text[: found.start()]
    if found[1] != _checksum(head, key):
        raise ValueError("it does not match its checksum")
    return head + b"}"


def _checksum(head: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + head).hexdigest()[:16].encode()
