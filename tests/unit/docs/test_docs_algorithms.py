"""The lists of advantages and losses in docs/algorithms.md are made from the code; run this file to write them."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from penstock.registry import Registry
from penstock.train.advantages import ADVANTAGES
from penstock.train.advantages import base as functions
from penstock.train.algorithm import settings_of
from penstock.train.losses import LOSSES

REGISTRIES = {"train.advantage": ADVANTAGES, "train.loss": LOSSES}
PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def described(registry: Registry) -> Iterator[str]:
    """A heading for each entry, the first lines of its module and function, and a table of its settings."""
    for name in registry.table:
        function = functions.described(registry.load(name)).function
        texts = (inspect.getmodule(function).__doc__, function.__doc__)
        summary = " ".join((text or "").partition("\n")[0] for text in texts).strip()
        yield f"### `{name}`\n\n{textwrap.fill(summary, 120, break_on_hyphens=False)}\n"
        kind = settings_of(function)
        if kind is not None and kind.model_fields:
            texts = field_texts(kind)
            rows = [f"| `{key}` | `{field.default}` | {texts[key]} |" for key, field in kind.model_fields.items()]
            yield "\n".join(["| setting | default | |", "|---|---|---|", *rows]) + "\n"


def field_texts(kind: type[BaseModel]) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("penstock.train"):
            [tree] = ast.parse(inspect.getsource(base)).body
            for field, text in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[field.target.id] = " ".join(text.value.value.split())
    return found


def made(key: str) -> str:
    return f"<!-- {key} -->\n\n" + "\n".join(described(REGISTRIES[key])) + f"\n<!-- end of {key} -->"


@pytest.mark.parametrize("key", ["train.advantage", "train.loss"])
def test_the_page_lists_every_entry_with_its_paper_and_settings(key: str) -> None:
    assert made(key) in PAGE.read_text()


if __name__ == "__main__":
    page = PAGE.read_text()
    for each in ("train.advantage", "train.loss"):
        before, _, rest = page.partition(f"<!-- {each} -->")
        page = before + made(each) + rest.partition(f"<!-- end of {each} -->")[2]
    PAGE.write_text(page)
