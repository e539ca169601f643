"""The links of the security policy lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_links_of_the_policy_exist() -> None:
    links = re.findall(r"\[[^\]]+\]\(([^)]+)\)", (ROOT / "SECURITY.md").read_text())
    assert [target for target in links if not (ROOT / target.split("#")[0]).exists()] == []
