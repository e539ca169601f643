"""`_target_` of a YAML entry to a flow's class: only out of installed packages and the user's own project."""

import importlib
import importlib.util
import inspect
import json
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError
from penstock.sdk.flows.base import AgentFlowBase


def load_target(target: str, projects: Sequence[Path], where: str) -> type[AgentFlowBase]:
    """The flow that `module.Class` names; ConfigError, which begins with `where`, says why there is none.

    Modules of Python itself, and those that lie anywhere else than in an installed package or under `projects`, are refused
    before they are imported.
    """
    parts = target.replace(":", ".").split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where}: _target_ {target!r} is no dotted path; write package.module.Class")
    _admit(parts[0], projects, where)
    found = _reached(parts, target, where)
    if not (inspect.isclass(found) and issubclass(found, AgentFlowBase)):
        raise ConfigError(f"{where}: _target_ {target!r} is no subclass of AgentFlowBase; name the flow's class")
    check_flow(found, where)
    return found


def check_flow(flow: type[AgentFlowBase], where: str) -> None:
    """ConfigError where a class cannot be run as a flow."""
    if inspect.isabstract(flow):
        missing = ", ".join(sorted(flow.__abstractmethods__))
        raise ConfigError(f"{where}: {flow.__name__} still lacks {missing}; define it")
    if not inspect.iscoroutinefunction(inspect.unwrap(flow.run)):
        raise ConfigError(f"{where}: {flow.__name__}.run is not async; write `async def run(self, sampling_params, **kwargs)`")


def importable(projects: Sequence[Path]) -> None:
    """Let modules be found in the user's project, before others of the same name."""
    for project in reversed(projects):
        if str(project.resolve()) not in sys.path:
            sys.path.insert(0, str(project.resolve()))


def _admit(top: str, projects: Sequence[Path], where: str) -> None:
    """ConfigError where the top package is neither installed nor the user's own; nothing is imported to find out."""
    if top in sys.stdlib_module_names:
        raise ConfigError(f"{where}: _target_ names {top!r}, a module of Python itself; name a flow of yours or of a package")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        folders = " or ".join(str(project) for project in projects)
        raise ConfigError(f"{where}: there is no module {top!r}; put it under {folders}, or install its package")
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    roots = [*(project.resolve() for project in projects), *_installed()]
    for place in places:
        if not any(Path(place).resolve().is_relative_to(root) for root in roots):
            text = f"{where}: {top!r} lies at {place}, which is neither an installed package nor under {projects[0]}"
            raise ConfigError(f"{text}; install it, or move it there")


def _reached(parts: Sequence[str], target: str, where: str) -> Any:
    """What stands at the end of the path: modules as far as they go, then attributes."""
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
def _installed() -> tuple[Path, ...]:
    """Folders that packages are installed in: those of this interpreter, and the sources of packages installed as editable."""
    own = Path(__file__).resolve().parents[2]
    paths = {*site.getsitepackages(), site.getusersitepackages(), *(sysconfig.get_path(key) for key in ("purelib", "platlib"))}
    return (own, *(Path(path).resolve() for path in sorted(paths)), *_editable())


def _editable() -> Iterator[Path]:
    for each in distributions():
        told = cast("dict[str, Any]", json.loads(each.read_text("direct_url.json") or "{}"))
        if told.get("dir_info", {}).get("editable"):
            yield Path(unquote(urlsplit(str(told["url"])).path)).resolve()
