"""Fills in the generated pages, and turns links that lead out of docs/ into file names."""

import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from reference import GENERATED

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
MARK = re.compile(r"<!-- generated: ([\w ]+) -->")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The site has only the files of docs/: a link to another file becomes its name."""
    folder = PurePosixPath(page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = link[2].split("#")[0]
        ups = target.split("/").count("..")
        return f"{link[1]} (`{target.replace('../', '')}`)" if ups > len(folder.parts) else link[0]

    return MARK.sub(lambda mark: GENERATED[mark[1]](), LINK.sub(named, markdown))
