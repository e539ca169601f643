"""Every promise in tests/promises has tests, and the tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "tests" / "promises").glob("*.md"))
SOURCES = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "packages").rglob("tests/**/*.py")]
ROWS = {"claw-r1": 40, "faults": 45, "osmosis": 25, "security": 40}
"""The least number of promises on each page."""


def promises(page: Path) -> list[list[str]]:
    """The rows of the page's tables; the last cell names the tests."""
    rows = re.findall(r"^\| (.*?)\|$", page.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in rows if not row.endswith("tests ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_promises_name_tests_that_exist(page: Path) -> None:
    known = {name for file in SOURCES for name in re.findall(r"def (test_\w+)", file.read_text())}
    rows = promises(page)
    named = [set(re.findall(r"`(test_\w+)`", row[-1])) for row in rows]
    assert len(rows) >= ROWS[page.stem]
    assert [row for row, tests in zip(rows, named, strict=True) if not tests and "Cannot occur" not in row[-2]] == []
    assert set().union(*named) - known == set()
