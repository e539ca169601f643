"""What `docs/gateway.md` says of codes, metrics and limits is what there is."""

import re
from pathlib import Path

from penstock.config import GatewaySection
from penstock.gateway.observability import FAMILIES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/gateway.md").read_text()


def reported(heading: str, *, column: int = 0) -> set[str]:
    """What stands in backticks in a column of the table under a heading."""
    table = [line for line in PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines() if line.startswith("| `")]
    return {name for line in table for name in re.findall(r"`([a-z_]+)", line.split("|")[column + 1])}


def test_every_code_of_an_error_is_listed():
    rooms = ("src/penstock/gateway", "src/penstock/http", "packages/compat/src/penstock_compat/gateway")
    sources = "".join(file.read_text() for room in rooms for file in (ROOT / room).rglob("*.py"))
    used = set(re.findall(r'code="([a-z_]+)"', sources)) | set(re.findall(r'\(\w+, \d{3}, "([a-z_]+)"\)', sources))
    assert reported("Errors by code") == used | {"internal_error"}


def test_every_metric_is_listed():
    assert reported("Metrics") | {"penstock_notices_total"} == set(FAMILIES)


def test_every_limit_that_is_listed_has_that_default():
    limits = PAGE.split("## Limits\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", limits, re.MULTILINE)
    fields = GatewaySection.model_fields
    assert rows and [(name, default) for name, default in rows if float(default) != fields[name].default] == []
