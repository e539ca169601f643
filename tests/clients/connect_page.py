"""The parts of `docs/agents.md` that the client tests run: blocks by heading or tab, and the variables of the first block."""

import re
import shlex
from textwrap import dedent

from environments import ROOT

TEXT = "## Any client" + (ROOT / "docs/agents.md").read_text().partition("## Any client")[2].partition("## A program in")[0]
GATEWAY = (ROOT / "docs/gateway.md").read_text()
ADDRESS, KEY = "http://127.0.0.1:8000", "mk-…"


def blocks(title: str, language: str) -> list[str]:
    """The blocks under a heading or tab, with `{root}` and `{token}` for the page's address and key."""
    parts = re.split(r'^(?:#+ |=== ")(.*?)"?\n', TEXT, flags=re.MULTILINE)
    under = "".join(text for each, text in zip(parts[1::2], parts[2::2], strict=True) if each == title)
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", under, re.DOTALL | re.MULTILINE)
    return [dedent(block).replace(ADDRESS, "{root}").replace(KEY, "{token}") for block in found]


def variables() -> dict[str, str]:
    """The variables that the page exports."""
    [block] = blocks("Any client", "bash")
    return dict(word.split("=", 1) for word in shlex.split(block) if word != "export")
