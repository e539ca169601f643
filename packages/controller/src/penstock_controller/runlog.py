"""The log of one run: its process's output as JSON lines, with secrets redacted and the size bounded."""

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import orjson

from penstock_controller.runs import now

MAX_LINE_CHARS = 16_000
"""Longer lines are truncated, with a note."""
_BUFFER_BYTES = 128 * 1024
"""Limit of an unfinished line. More than MAX_LINE_CHARS, so that a secret across that limit is still redacted."""
REDACTED = "[redacted]"

_CONTROL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")
"""Terminal escape sequences and control characters."""
_ERROR = re.compile(r"^penstock: |^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)(?::|$)|\b(?:ERROR|CRITICAL|FATAL)\b")
_WARNING = re.compile(r"\bWARN(?:ING)?\b|Warning:")
_STEP = re.compile(r"^step +(\d+)/\d")


class SecretRedactor:
    """Replaces known secrets in a text, in all forms in which programs print them."""

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values for part in _parts(value) for form in _forms(part)}
        self._secret = re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)) or r"(?!)")

    def __call__(self, text: str) -> str:
        return self._secret.sub(REDACTED, text)


class LineDecoder:
    """Splits a byte stream into redacted lines. After carriage returns, only the last text is tail, as on a terminal."""

    def __init__(self, redact: SecretRedactor) -> None:
        self._redact = redact
        self._rest = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yields the lines that end in `chunk`."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            if not self._skipping:
                yield self._text(self._rest + end)
            self._rest.clear()
            self._skipping = False
        self._rest += rest
        if len(self._rest) > _BUFFER_BYTES:
            tail = self._rest.rpartition(b"\r")[2]  # a progress bar never ends its line
            if len(tail) > _BUFFER_BYTES:
                if not self._skipping:
                    yield self._text(tail)
                self._skipping, tail = True, bytearray()
            self._rest = tail

    def close(self) -> Iterator[str]:
        """Yields the last line if no newline ended it."""
        if self._rest and not self._skipping:
            yield self._text(self._rest)
        self._rest.clear()

    def _text(self, line: bytearray) -> str:
        text = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
        text = self._redact(_CONTROL_CODES.sub("", text))
        return text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]} … (a longer line; the rest is left out)"


class RunLog:
    """A log file open for appending. On a full disk, lines are dropped and counted; the run continues."""

    def __init__(self, path: Path, limit_mb: float) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._limit = int(limit_mb * 1_000_000)
        self._size = self._truncate_partial_line()
        self.resumed = self._size > 0
        """Whether an earlier process wrote to this file."""
        self._full = self._size > self._limit
        self._dropped = 0
        self.reason = ""
        """The last error line; else the last line that the process wrote."""
        self._error = False

    def close(self) -> None:
        """Syncs and closes the file."""
        with suppress(OSError):  # a disk error must not lose the end of the run
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def add(self, text: str, level: str = "") -> None:
        """Appends one line; its level is derived from the text unless `level` is given."""
        found = level or level_of(text)
        if text.strip() and (found == "error" or not (level or self._error)):
            self.reason, self._error = text.strip()[:500], found == "error"
        if self._full:
            return
        if self._dropped and self._write(_entry(f"{self._dropped} lines are missing here: the disk was full", "warning")):
            self._dropped = 0
        entry = _entry(text, found)
        if self._size + len(entry) > self._limit:
            self._full = True
            entry = _entry(f"the log is full ({self._limit / 1e6:g} MB); what is said from here on is left out", "warning")
        if not self._write(entry):
            self._dropped += 1

    def _write(self, entry: bytes) -> bool:
        try:
            written = os.write(self._descriptor, entry)
        except OSError:
            written = 0
        if written < len(entry):
            with suppress(OSError):  # a partial line would make the next one unreadable
                os.ftruncate(self._descriptor, self._size)
            return False
        self._size += written
        return True

    def _truncate_partial_line(self) -> int:
        """Removes the partial last line that a killed process left; returns the file's size."""
        size = before = os.fstat(self._descriptor).st_size
        while size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            start = max(0, size - 65536)
            size = start + os.pread(self._descriptor, size - start, start).rfind(b"\n") + 1
        if size < before:
            os.ftruncate(self._descriptor, size)
        return size


def level_of(text: str) -> str:
    """Returns `error`, `warning` or `info`, as the line suggests."""
    return "error" if _ERROR.search(text) else "warning" if _WARNING.search(text) else "info"


def _entry(text: str, level: str) -> bytes:
    step = _STEP.match(text)
    entry: dict[str, Any] = {"timestamp": now(), "level": level, "step": step.group(1) if step else "", "message": text}
    return orjson.dumps(entry | {"details": None}, option=orjson.OPT_APPEND_NEWLINE)


def _parts(value: str) -> list[str]:
    """Returns the value and, since logs are split at newlines, each of its longer lines."""
    lines = [line.strip() for line in value.splitlines()]
    return [part for part in (value, value.strip(), *(line for line in lines if len(line) >= 8 or len(lines) == 1)) if part]


def _forms(value: str) -> Iterator[str]:
    """Yields the value as it is, JSON-escaped, as a Python repr, URL-quoted and in base64."""
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    yield quote(value, safe="")
    yield quote_plus(value)
    if len(value) >= 6:
        yield base64.b64encode(value.encode()).decode().rstrip("=")
        yield base64.urlsafe_b64encode(value.encode()).decode().rstrip("=")
