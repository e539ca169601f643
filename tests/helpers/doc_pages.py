"""The code blocks of the pages in docs/, by heading and tab."""

import re
from pathlib import Path
from textwrap import dedent

DOCS = Path(__file__).parents[2] / "docs"
TITLE = re.compile(r'^(?:#+ (.*)|=== "(.*)")\n', re.MULTILINE)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def section(name: str, heading: str) -> str:
    """The text under a heading of a page, without its subsections' siblings: up to the next heading of the same level."""
    [found] = re.findall(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,6}} |\Z)", page(name), re.DOTALL | re.MULTILINE)
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a language, without their indentation."""
    return [dedent(block) for block in re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)]


def titled_blocks(text: str, title: str, language: str) -> list[str]:
    """The blocks under headings or tabs of this title."""
    parts = TITLE.split(text)
    found = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return [block for heading, tab, under in found if title in (heading, tab) for block in blocks(under, language)]
