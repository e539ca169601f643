"""Reads a `.env` file in or above the working directory. Variables that are already set stay unchanged."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*
    (?:"(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>[^']*)' | (?P<bare>[^#\n]*?(?:[^\s#]\#[^\n]*?)?))\s*(?:\#.*)?""",
    re.VERBOSE,
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def load_environment(start: Path) -> None:
    """Loads the nearest `.env` in `start` or its parents."""
    for folder in (start, *start.parents):
        file = folder / ".env"
        if file.is_file():
            for name, value in read_settings(file.read_text(encoding="utf-8", errors="replace")):
                os.environ.setdefault(name, value)
            return


def read_settings(text: str) -> Iterator[tuple[str, str]]:
    """Yields name and value of each line that sets a variable, and skips other lines."""
    for line in text.splitlines():
        if (found := LINE.fullmatch(line)) is None:
            continue
        double, single, bare = found.group("double", "single", "bare")
        if double is not None:
            yield found["name"], re.sub(r"\\(.)", lambda escape: ESCAPES.get(escape[1], escape[1]), double)
        else:
            yield found["name"], single if single is not None else bare
