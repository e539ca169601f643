"""The bounds in `docs/reference/bounds.md` are those of the source."""

import re
from importlib import import_module
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs/reference/bounds.md").read_text()


def test_every_bound_has_the_value_that_is_told():
    rows = re.findall(r"^\| .+ \| (\d+) \| `([\w.]+):(\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == PAGE.count("` |\n") > 40
    assert [row for row in rows if getattr(import_module(f"penstock.{row[1]}"), row[2]) != int(row[0])] == []
