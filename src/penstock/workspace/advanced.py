"""`[advanced]` of an experiment file: keys of penstock's own tables, and whatever others understand."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from penstock.config import EngineSection, RunConfig
from penstock.engines import SECTIONS
from penstock.errors import Issue

ELSEWHERE = {
    "agent.entry": "experiment.entrypoint",
    "dataset.train": "experiment.dataset",
    "model.name": "experiment.model_path",
    "workflow": "workflow",
    "grader": "grader",
}
"""Keys that the file has another place for."""


class Advanced(NamedTuple):
    """What was found under `[advanced]`."""

    tree: dict[str, dict[str, Any]]
    """Tables of a run's config."""
    unknown: tuple[Issue, ...]
    """Keys that mean nothing here; they are kept with the run."""
    wrong: tuple[Issue, ...]


def read_advanced(table: Mapping[str, Any], *, engine: str | None = None) -> Advanced:
    """Sort the keys: `[advanced.train] steps = 2` and `"train.steps" = 2` say the same. `engine` is the model path's."""
    tree: dict[str, dict[str, Any]] = {}
    unknown: list[Issue] = []
    wrong: list[Issue] = []
    kind = _engine_section(table, engine)
    for section, key, value in _flat(table):
        name = f"{section}.{key}" if key else section
        if other := ELSEWHERE.get(name) or ELSEWHERE.get(section):
            wrong.append(Issue(f"advanced.{name}", f"advanced.{name}: {other} says that; write it there"))
        elif key and _known(section, key, kind):
            tree.setdefault(section, {})[key] = value
        else:
            unknown.append(Issue(f"advanced.{name}", f"advanced.{name} is kept with the run and changes nothing here"))
    return Advanced(tree, tuple(unknown), tuple(wrong))


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for key, value in table.items():
        section, _, rest = key.partition(".")
        if rest or not isinstance(value, Mapping):
            yield section, rest, value
        else:
            yield from ((section, inner, held) for inner, held in cast("Mapping[str, Any]", value).items())


def _engine_section(table: Mapping[str, Any], engine: str | None) -> type[BaseModel]:
    named = {f"{section}.{key}": value for section, key, value in _flat(table)}.get("engine.name", engine)
    return SECTIONS.load(named) if isinstance(named, str) and named in SECTIONS else EngineSection


def _known(section: str, key: str, engine: type[BaseModel]) -> bool:
    if section not in RunConfig.model_fields:
        return False
    kind: Any = engine if section == "engine" else RunConfig.model_fields[section].annotation
    return not (isinstance(kind, type) and issubclass(kind, BaseModel)) or key in kind.model_fields
