"""The flows that an agent's rows may name: built in, registered by decorator, or listed in a YAML file with their `_target_`."""

import difflib
import importlib
import importlib.util
import inspect
import json
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

import yaml

from penstock.errors import ConfigError
from penstock.registry import Registry
from penstock_compat.flows.base import AgentFlowBase

F = TypeVar("F", bound=type[AgentFlowBase])

BUILT_IN = Registry(
    "flow",
    {
        "single_step_single_turn_agent": "penstock_compat.flows.builtin:SingleStepSingleTurnAgentFlow",
        "multi_step_agent": "penstock_compat.flows.builtin:MultiStepAgentFlow",
        "blackbox_gsm8k_agent": "penstock_compat.flows.gsm8k:BlackBoxGSM8KAgentFlow",
    },
)
REGISTERED: dict[str, type[AgentFlowBase]] = {}
"""Filled by `@register` in this process."""
RESERVED_KEYWORDS = frozenset({"trainer_config", "gateway_url", "tokenizer", "processor", "dataset_cls", "dataset_config"})
"""Keywords of the constructor that a YAML entry may not set."""


@dataclass(frozen=True, slots=True)
class FlowEntry:
    """A flow's class, with extra keywords for its constructor."""

    cls: type[AgentFlowBase]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def register(name: str) -> Callable[[F], F]:
    """Registers a flow, as `@register("my_flow")` above its class; the last of a name counts."""
    if not isinstance(name, str) or not name.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f'@register takes a name, not {name!r}; write @register("my_flow")')

    def decorate(flow: F) -> F:
        REGISTERED[name] = flow
        return flow

    return decorate


def registered_names(flow: type[AgentFlowBase]) -> list[str]:
    """Returns the names under which a class was registered, else its own name."""
    return [name for name, known in REGISTERED.items() if known is flow] or [flow.__name__]


class FlowTable:
    """The flows that an agent's rows may name."""

    def __init__(self, own: Mapping[str, FlowEntry]) -> None:
        self._own = {**{name: FlowEntry(flow) for name, flow in REGISTERED.items()}, **own}

    def names(self) -> list[str]:
        return sorted({*BUILT_IN, *self._own})

    def pick(self, name: str) -> FlowEntry:
        """Returns the flow of this name; ConfigError lists the known ones."""
        if name in self._own:
            return self._own[name]
        if name in BUILT_IN:
            return FlowEntry(BUILT_IN.load(name))
        near = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise ConfigError(f"unknown flow {name!r}; {hint}: {', '.join(self.names())}")

    def check(self, names: Iterable[str]) -> None:
        """Raises ConfigError for the first unknown name."""
        for name in names:
            if name not in self._own and name not in BUILT_IN:
                self.pick(name)


def read_flows(path: Path, projects: Sequence[Path]) -> dict[str, FlowEntry]:
    """Reads the flows of a YAML list; ConfigError names the entry that cannot be used."""
    add_to_sys_path(projects)
    flows: dict[str, FlowEntry] = {}
    for number, entry in enumerate(_entries(path), 1):
        where = f"{path}, entry {number}"
        name = entry.get("name")
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{where}: no name; add one, such as `name: my_flow`")
        where = f"{where} ({name!r})"
        if name in flows:
            raise ConfigError(f"{where}: an entry before it has the same name; rename one")
        flows[name] = _flow(entry, projects, where)
    return flows


def _entries(path: Path) -> list[dict[str, Any]]:
    example = "- name: my_flow\\n  _target_: my_module.MyFlow"
    try:
        loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise ConfigError(f"{path}: no such file; check [agent] flows") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: cannot be read: {cause}") from cause
    except yaml.YAMLError as cause:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(cause).split())}") from cause
    if not isinstance(loaded, list) or not loaded:
        raise ConfigError(f"{path}: a list of flows is expected; write {example!r}")
    for number, entry in enumerate(cast("list[Any]", loaded), 1):
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}, entry {number}: {type(entry).__name__} instead of a table; write {example!r}")
    return cast("list[dict[str, Any]]", loaded)


def _flow(entry: dict[str, Any], projects: Sequence[Path], where: str) -> FlowEntry:
    target = entry.get("_target_")
    if not isinstance(target, str):
        raise ConfigError(f"{where}: no _target_; add one, such as `_target_: my_module.MyFlow`")
    options: dict[Any, Any] = {key: value for key, value in entry.items() if key != "_target_"}
    for key in options:
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_") or key in RESERVED_KEYWORDS:
            raise ConfigError(f"{where}: key {key!r} cannot be given here; use names of the flow's own")
    flow = FlowEntry(load_target(target, projects, where), options)
    check_options(flow, where)
    return flow


def check_options(flow: FlowEntry, where: str) -> None:
    """Raises ConfigError if the constructor does not take the keywords, or would ignore one. The class is not instantiated."""
    check_flow(flow.cls, where)
    signature = inspect.signature(flow.cls)
    try:
        signature.bind(**dict.fromkeys(RESERVED_KEYWORDS), **flow.options)
    except TypeError as cause:
        text = f"{where}: {flow.cls.__name__}(…) {cause}"
        raise ConfigError(f"{text}; let __init__ take its keys and **kwargs, and pass those on") from cause
    ignored = flow.options.keys() - {"name", *signature.parameters}
    if ignored and flow.cls.__init__ is AgentFlowBase.__init__:
        raise ConfigError(f"{where}: {flow.cls.__name__} has no use for {sorted(ignored)[0]!r}; let its __init__ take the key")


# Import of `_target_` classes


def load_target(target: str, projects: Sequence[Path], where: str) -> type[AgentFlowBase]:
    """Imports the flow that `module.Class` names; ConfigError, which begins with `where`, says why it cannot.

    Modules of Python itself, and those outside of installed packages and `projects`, are refused before they are imported.
    """
    parts = target.replace(":", ".").split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: _target_ {target!r} is no dotted path; write package.module.Class")
    _check_location(parts[0], projects, where)
    found = _import_path(parts, target, where)
    if not (inspect.isclass(found) and issubclass(found, AgentFlowBase)):
        raise ConfigError(f"{where}: _target_ {target!r} is no subclass of AgentFlowBase; name the flow's class")
    check_flow(found, where)
    return found


def check_flow(flow: type[AgentFlowBase], where: str) -> None:
    """Raises ConfigError if a class cannot be run as a flow."""
    if inspect.isabstract(flow):
        missing = ", ".join(sorted(flow.__abstractmethods__))
        raise ConfigError(f"{where}: {flow.__name__} still lacks {missing}; define it")
    if not inspect.iscoroutinefunction(inspect.unwrap(flow.run)):
        raise ConfigError(f"{where}: {flow.__name__}.run is not async; write `async def run(self, sampling_params, **kwargs)`")


def add_to_sys_path(projects: Sequence[Path]) -> None:
    """Makes the user's own modules importable, before others of the same name."""
    for project in reversed(projects):
        if str(project.resolve()) not in sys.path:
            sys.path.insert(0, str(project.resolve()))


def _check_location(top: str, projects: Sequence[Path], where: str) -> None:
    """Raises ConfigError if the top package is neither installed nor the user's own; nothing is imported."""
    if top in sys.stdlib_module_names:
        raise ConfigError(f"{where}: _target_ names {top!r}, a module of Python itself; name a flow of yours or of a package")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        folders = " or ".join(str(project) for project in projects)
        raise ConfigError(f"{where}: there is no module {top!r}; put it under {folders}, or install its package")
    locations = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    roots = [*(project.resolve() for project in projects), *_install_folders()]
    for location in locations:
        if not any(Path(location).resolve().is_relative_to(root) for root in roots):
            text = f"{where}: {top!r} lies at {location}, which is neither an installed package nor under {projects[0]}"
            raise ConfigError(f"{text}; install it, or move it there")


def _import_path(parts: Sequence[str], target: str, where: str) -> Any:
    """Resolves a dotted path: modules as far as they go, then attributes."""
    value: Any = None
    for depth, name in enumerate(parts, 1):
        path = ".".join(parts[:depth])
        try:
            value = importlib.import_module(path) if depth == 1 or _has_module(value, path) else getattr(value, name)
        except KeyboardInterrupt:
            raise
        except BaseException as cause:  # whatever a module does on import, the user gets one line about it
            if isinstance(cause, AttributeError) and not hasattr(value, name):
                raise ConfigError(f"{where}: _target_ {target!r}: there is no {name!r} in it; check the name") from cause
            text = f"{type(cause).__name__}: {cause}".replace("\n", " ")
            raise ConfigError(f"{where}: _target_ {target!r} cannot be imported: {text}; fix the module, or the path") from cause
    return value


def _has_module(package: Any, path: str) -> bool:
    return isinstance(package, ModuleType) and hasattr(package, "__path__") and importlib.util.find_spec(path) is not None


@cache
def _install_folders() -> tuple[Path, ...]:
    """Returns the folders of installed packages: site-packages, and the sources of editable installs."""
    own = Path(__file__).resolve().parents[2]
    paths = {*site.getsitepackages(), site.getusersitepackages(), *(sysconfig.get_path(key) for key in ("purelib", "platlib"))}
    return (own, *(Path(path).resolve() for path in sorted(paths)), *_editable_folders())


def _editable_folders() -> Iterator[Path]:
    for each in distributions():
        source = cast("dict[str, Any]", json.loads(each.read_text("direct_url.json") or "{}"))
        if source.get("dir_info", {}).get("editable"):
            yield Path(unquote(urlsplit(str(source["url"])).path)).resolve()
