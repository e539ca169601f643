"""The tables of docs/benchmarks.md are made from bench/results; run this file to write them."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "benchmarks.md"
MARK = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def rendered(name: str) -> str:
    """The command, the machine and the table of a results file."""
    found = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    lines = [found["columns"], ["---"] * len(found["columns"]), *found["rows"]]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"<!-- results: {name} -->\n\n```bash\n{found['command']}\n```\n\nSetup: {found['machine']}.\n\n{table}\n\n<!-- end -->"


def page() -> str:
    return MARK.sub(lambda mark: rendered(mark[1]), PAGE.read_text())


def test_tables_are_those_of_the_results() -> None:
    assert PAGE.read_text() == page()


def test_every_results_file_is_on_the_page() -> None:
    names = {file.stem for file in (ROOT / "bench" / "results").glob("*.json")}
    assert {name for name in names if name not in PAGE.read_text()} == set()


if __name__ == "__main__":
    PAGE.write_text(page())
