"""The security page promises nothing without a test, and the tests that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "security.md"
POLICY = ROOT / "SECURITY.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def promises() -> list[tuple[str, str]]:
    """The rows of the page's tables: what holds, and the tests that hold it."""
    parts = re.findall(r"^\| what holds \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    rows = [row.strip("|").split(" | ") for part in parts for row in part.splitlines()]
    assert [row for row in rows if len(row) != 2] == []
    return [(said.strip(), tests.strip()) for said, tests in rows]


def test_every_table_of_the_page_has_promises_in_sentences() -> None:
    text = PAGE.read_text()
    assert len(promises()) >= 40
    assert len(re.findall(r"^\|---", text, re.MULTILINE)) == len(re.findall(r"^\| what holds \| test \|$", text, re.MULTILINE))
    assert [said for said, _ in promises() if not said.endswith(".")] == []


@pytest.mark.parametrize(("said", "tests"), promises(), ids=lambda text: text[:60])
def test_every_promise_is_held_by_tests_that_are_there(said: str, tests: str) -> None:
    links = LINK.findall(tests)
    assert links and not LINK.sub("", tests).strip(", "), said
    for name, target in links:
        file = (PAGE.parent / target).resolve()
        assert file.is_relative_to(ROOT / "tests") and file.is_file(), target
        assert re.search(rf"def {re.escape(name.strip('`'))}\(", file.read_text()), f"{name} is not in {target}"


def test_every_link_of_the_policy_leads_somewhere() -> None:
    text = POLICY.read_text()
    assert [target for _, target in LINK.findall(text) if not (ROOT / target.split("#")[0]).exists()] == []
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    }
    assert {target.split("#")[1] for _, target in LINK.findall(text) if "#" in target} <= headings
