"""Names of the package: every class has its own, and none is a word that only its docstring explains."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "penstock"

REPEATED = {
    "BoundModel",  # of two agent frameworks; authors of either import it by this name
    "RolloutAgent",  # the same
    "RolloutModel",  # the same
}
"""Class names that several files may have."""

# fmt: off
RIDDLES = frozenset({
    "scribe", "letters", "dictation", "bell", "seals", "tallies", "shelves", "flight", "flights", "told", "talk", "growth",
    "board", "errand", "errands", "outlet", "outlets", "speech", "zygote", "nursery", "guests", "warmth", "course", "keeper",
    "keepers", "sealing", "stations", "station", "strays", "elsewhere", "telling", "following", "relay", "relays", "wire",
})
# fmt: on
"""Words that once named something here and said nothing to a reader who did not know."""

ALLOWED = {
    "relay_events",  # it relays events from an actor; the riddle was an engine called relay
}
"""Names in which such a word says what it means."""


def definitions() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        if name.startswith("templates/"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def words(name: str) -> set[str]:
    """The words of a name in snake_case or CamelCase."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_a_class_name_is_unique() -> None:
    files = defaultdict(set[str])
    for file, node in definitions():
        if isinstance(node, ast.ClassDef):
            files[node.name].add(file)
    assert {name: sorted(found) for name, found in files.items() if len(found) > 1 and name not in REPEATED} == {}


def test_no_name_is_a_riddle() -> None:
    modules = {str(file.relative_to(SOURCE)): file.stem for file in SOURCE.rglob("*.py") if "templates" not in file.parts}
    found = [(file, name) for file, name in modules.items() if words(name) & RIDDLES]
    found += [(file, node.name) for file, node in definitions() if words(node.name) & RIDDLES]
    assert [(file, name) for file, name in found if name not in ALLOWED] == []
