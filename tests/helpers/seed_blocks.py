"""The code blocks of the seed documents, read from the documents themselves: nothing of them is kept here."""

import ast
import os
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("PENSTOCK_SEEDS") or ROOT.parent / "shared" / "seeds")


class Block(NamedTuple):
    """One block of code: `000-4` is the fifth of seed 000."""

    name: str
    language: str
    code: str


def read_seed(number: str) -> list[Block]:
    """The blocks of a seed, in order; none where the document is absent."""
    files = sorted(FOLDER.glob(f"{number}_*"))
    if not files:
        return []
    text = files[0].read_text()
    found = fenced(text) or [("python", code) for code in unfenced(text)]
    return [Block(f"{number}-{place}", language, code) for place, (language, code) in enumerate(found)]


def fenced(text: str) -> list[tuple[str, str]]:
    """Language and code of each block between fences, without the indentation of what the fences stand in."""
    found = re.findall(r"^[ ]*```(\w+)[^\n]*\n(.*?)^[ ]*```", text, re.DOTALL | re.MULTILINE)
    return [(language, textwrap.dedent(code)) for language, code in found]


def unfenced(text: str) -> list[str]:
    """The longest runs of lines that are Python, where code stands between prose without any mark."""
    lines, found, at = text.splitlines(), [], 0
    while at < len(lines):
        end = next((end for end in range(len(lines), at, -1) if is_code("\n".join(lines[at:end]))), None)
        if end is not None:
            found.append("\n".join(lines[at:end]).strip("\n"))
        at = end or at + 1
    return found


def is_code(text: str) -> bool:
    """Whether it compiles and begins with a statement; a heading of one word is a mere name to Python."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    return bool(statements) and text.strip() != "" and not isinstance(statements[0], ast.Expr)
