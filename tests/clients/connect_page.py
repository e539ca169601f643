"""The page `docs/connect-your-agent.md` as the tests read it: blocks by heading, and the variables of its first block."""

import re
import shlex

from environments import ROOT

TEXT = (ROOT / "docs/connect-your-agent.md").read_text()
ADDRESS, KEY = "http://127.0.0.1:8000", "mk-…"


def blocks(heading: str, language: str) -> list[str]:
    """The blocks under a heading, with `{root}` and `{token}` for the page's address and key."""
    parts = re.split(r"^#+ (.*)\n", TEXT, flags=re.MULTILINE)
    under = "".join(text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title == heading)
    return [_open(block) for block in re.findall(rf"```{language}\n(.*?)```", under, re.DOTALL)]


def variables() -> dict[str, str]:
    """What the page tells everyone to export."""
    [block] = blocks("Connect your agent", "bash")
    return dict(word.split("=", 1) for word in shlex.split(block) if word != "export")


def _open(block: str) -> str:
    return block.replace(ADDRESS, "{root}").replace(KEY, "{token}")
