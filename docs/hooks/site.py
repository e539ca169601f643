"""The site's navigation, read from docs/README.md, and links that lead out of docs/."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """The index is the one ordered list of pages: its headings become sections, its links become entries."""
    index = (Path(config["docs_dir"]) / "README.md").read_text(encoding="utf-8")
    sections = [part.split("\n", 1) for part in index.split("\n## ")[1:]]
    config["nav"] = [{"Home": "README.md"}, *({title: _pages(text)} for title, text in sections)]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file outside of docs/, which the site does not have, becomes the file's name."""
    folder = PurePosixPath(page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = link[2].split("#")[0]
        ups = target.split("/").count("..")
        return f"{link[1]} (`{target.replace('../', '')}`)" if ups > len(folder.parts) else link[0]

    return LINK.sub(named, markdown)


def _pages(section: str) -> list[dict[str, str]]:
    return [{title: target} for title, target in LINK.findall(section) if not target.startswith("../")]
