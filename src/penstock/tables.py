"""TOML tables to typed sections, with dotted overrides; an unknown key is an error that names the nearest."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import ConfigError, Issue, several

T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or of one with the same in JSON (`.json`); ConfigError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return orjson.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as cause:
        raise ConfigError(f"{path}: no such file; give the path of a TOML file, or write one with `penstock quickstart`") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: cannot be read: {cause}") from cause
    except (tomllib.TOMLDecodeError, orjson.JSONDecodeError) as cause:
        raise ConfigError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {cause}") from cause


def override(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set keys of `tree`, each given as `section.key=value`."""
    for each in overrides:
        _apply(tree, each)


def validate(model: type[T], tree: Mapping[str, Any], where: str) -> T:
    """Build `model` from `tree`; ConfigError has an issue, and a line, for each thing that is wrong."""
    try:
        return model.model_validate(tree)
    except ValidationError as cause:
        raise several(where, _issues(model, cause)) from cause


def flaws(model: type[BaseModel], tree: Mapping[str, Any]) -> list[Issue]:
    """All that keeps `tree` from being a `model`; none where nothing does."""
    try:
        model.model_validate(tree)
    except ValidationError as cause:
        return _issues(model, cause)
    return []


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = [part.strip() for part in key.split(".")]
    if not equals or not all([*sections, last]):
        raise ConfigError(f"--set {override!r}: write it as section.key=value, for example train.lr=1e-5")
    value = _value(text)
    for section in sections:
        below: Any = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
        tree = below  # pyright: ignore[reportUnknownVariableType]
    tree[last] = value


def _value(text: str) -> Any:
    """`text` as a TOML value; as it stands where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _issues(model: type[BaseModel], cause: ValidationError) -> list[Issue]:
    """In the order of the file's tables, but unknown keys first: one that is mistyped explains a missing one."""
    errors = sorted(cause.errors(), key=lambda error: error["type"] != "extra_forbidden")
    found: dict[str, Issue] = {}
    meant: set[str] = set()
    for error in errors:
        issue = _issue(model, error)
        if issue.correction:
            meant.add(".".join([*map(str, error["loc"][:-1]), issue.correction]))
        if not (error["type"] == "missing" and issue.key in meant):
            found.setdefault(issue.key, issue)
    return list(found.values())


def _issue(model: type[BaseModel], error: Any) -> Issue:
    path = ".".join(str(part) for part in error["loc"] if part != "[key]")  # which says that a key itself is wrong
    if error["type"] == "extra_forbidden":
        known = _fields_at(model, error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        if near:
            return Issue(path, f"unknown key {path!r}", near[0])
        return Issue(path, f"unknown key {path!r}; known keys: {', '.join(sorted(known))}")
    if error["type"] == "missing":
        return Issue(path, f"key {path!r} is missing; add it")
    if error["type"] in ("model_type", "dict_type"):
        return Issue(path, f"{path} = {error['input']!r}: write it as a table, [{path}]")
    message = error["msg"].removeprefix("Value error, ")
    remedy = "; write it in quotes" if error["type"] == "string_type" else ""
    return Issue(path, f"{path} = {error['input']!r}: {message[:1].lower()}{message[1:]}{remedy}")


def _fields_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
