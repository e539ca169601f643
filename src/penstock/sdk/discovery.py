"""Loads an Agent from the author's file: its one workflow, its one grader, and their configs with the TOML tables applied.

`AgentSpec` is what another interpreter needs to load the same agent.
"""

import difflib
import hashlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self, TypeVar, cast, get_args

from pydantic import BaseModel

from penstock.config import AgentSection, validate
from penstock.errors import ConfigError
from penstock.records import Task
from penstock.registry import Registry
from penstock.sdk.workflow import AgentWorkflow, AgentWorkflowConfig, BaseConfig, Grader, GraderConfig

T = TypeVar("T")

FACADES = "-e packages/compat in a checkout of Penstock"
PACKAGE_OF_MODULE = {
    "agents": "openai-agents",
    "claw_r1": FACADES,
    "langchain_openai": "langchain-openai",
    "osmosis_ai": FACADES,
    "strands": "strands-agents",
}
"""The package to install for a module of another name."""
GRADERS = Registry(
    "grader",
    {
        "rubric": "penstock.graders.rubric:RubricGrader",
    },
    wheels=dict.fromkeys(("rule", "function"), "penstock-compat"),
)
"""The built-in graders. `[grader] name` selects one, whatever grader the entry file holds."""
AGENT_KINDS = Registry(
    "kind of agent",
    {
        "command": "penstock.sdk.command:command_agent",
    },
    wheels={"flow": "penstock-compat"},
)
"""Functions that open an agent of one kind: `(source, workflow, grader)`, and for an imported entry file also its module."""
KIND_ATTRIBUTE = "__agent_kind__"
"""Set on a base class of authors: entry files with a subclass of it hold an agent of this kind."""
MAX_NAME_CHARS = 256


class AgentKind:
    """What a run does differently for a kind of agent. This one is of agents that are a workflow and a grader."""

    keeps_columns = False
    """Whether its tasks keep all columns of their rows."""

    def check_rows(self, agent: "Agent", tasks: Iterable[Task], where: Path) -> None:
        """Raises ConfigError if the agent cannot run a row of the file `where`."""

    def with_run_settings(self, agent: "Agent", *, model: Path, group_size: int) -> "Agent":
        """Returns the agent with what it needs to know of its run; `model` is `Path()` for an endpoint."""
        return agent

    def grader_by_rule(self, tasks: Iterable[Task]) -> type[Grader] | None:
        """Returns the grader that stands for an agent that grades its own rollouts; None if there is none for these tasks."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What an author's file holds, ready to run. Each rollout makes its own instances, with a copy of the config."""

    entry: Path
    workflow: type[AgentWorkflow[Any]]
    workflow_config: AgentWorkflowConfig | None
    """None if the file has no config object and the TOML sets nothing."""
    grader: type[Grader] | None
    """None only for an agent that was made in code, to be run without being graded."""
    grader_config: GraderConfig | None
    source: AgentSection = field(default_factory=AgentSection)
    """`[agent]` of the TOML. With `tables`, it lets another process load the same agent."""
    tables: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    """`[workflow]` and `[grader]` of the TOML."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """The source texts of an agent that was made from objects, by name; empty for one of an entry file."""
    trusted: bool = False
    """Whether its code gets a flow token, which may submit, grade and complete its own rollouts."""
    kind: AgentKind = field(default_factory=AgentKind)

    @property
    def graded_by_run(self) -> bool:
        """Whether its grader alone grades its rollouts. A flow may grade its own."""
        return self.grader is not None and not self.trusted

    @property
    def grader_name(self) -> str:
        """The source of its grades."""
        return self.grader_config.name if self.grader_config else self.grader.__name__ if self.grader else "none"


def open_agent(source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Agent:
    """Loads the agent that `source` names; `workflow` and `grader` are the TOML tables of that name."""
    if source.command and (source.flow or source.flows):
        raise ConfigError("[agent] has both a command and flows; keep one of them")
    if source.command:
        return AGENT_KINDS.load("command")(source, workflow, grader)
    if source.flow or source.flows:
        return AGENT_KINDS.load("flow")(source, workflow, grader)
    module = import_entry(source.entry)
    if kind := _kind_of(module):
        return AGENT_KINDS.load(kind)(source, workflow, grader, module)
    return find_agent(module, source, workflow, grader)


def _kind_of(module: ModuleType) -> str:
    """Returns the kind of agent whose base class an entry file subclasses; empty if it has a workflow, or no such class."""
    if any(True for _ in subclasses(module, AgentWorkflow)):
        return ""
    bases = (base for member in subclasses(module, object) for base in member.__mro__)
    return next((vars(base)[KIND_ATTRIBUTE] for base in bases if KIND_ATTRIBUTE in vars(base)), "")


def load_agent(source: AgentSection | Path, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Agent:
    """Imports the entry file and finds its workflow and grader; `workflow` and `grader` are TOML tables that set config fields.

    The file holds exactly one concrete AgentWorkflow subclass and one concrete Grader subclass, imported names included, and at
    most one config object of each. Its folder is importable, so it may import its siblings.
    """
    source = source if isinstance(source, AgentSection) else AgentSection(entry=source)
    return find_agent(import_entry(source.entry), source, workflow, grader)


def find_agent(module: ModuleType, source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Agent:
    """Finds the workflow and the grader of an imported entry file; see `load_agent`."""
    entry = source.entry
    agent_class = _only_class(module, AgentWorkflow, entry)
    _check_async(agent_class, "run", entry)
    loaded = find_grader(module, grader, entry)
    return Agent(
        entry=entry,
        workflow=agent_class,
        workflow_config=_config(module, AgentWorkflowConfig, agent_class, "workflow", workflow, entry),
        grader=loaded.grader,
        grader_config=loaded.config,
        source=source,
        tables=(workflow, grader),
    )


class LoadedGrader(NamedTuple):
    grader: type[Grader]
    config: GraderConfig | None


def find_grader(module: ModuleType, table: Mapping[str, Any], entry: Path) -> LoadedGrader:
    """Returns the built-in grader that `[grader]` names, else the one of an imported entry file, with `[grader]` applied."""
    if names_built_in_grader(table):
        return load_built_in_grader(table["name"], table, entry)
    grader = _only_class(module, Grader, entry)
    _check_async(grader, "grade", entry)
    return LoadedGrader(grader, _config(module, GraderConfig, grader, "grader", table, entry))


def names_built_in_grader(table: Mapping[str, Any]) -> bool:
    """Returns whether `[grader]` names a built-in grader: the entry file need not hold one."""
    return table.get("name", "") in GRADERS


def load_built_in_grader(name: str, table: Mapping[str, Any], entry: Path) -> LoadedGrader:
    """Loads a built-in grader with `[grader]` applied; its paths are relative to the entry file's folder."""
    grader = GRADERS.load(name)
    config = _apply(getattr(grader, "settings", GraderConfig), None, {"name": name, **table}, name, "grader")
    files = {key: entry.parent / value for key, value in config if isinstance(value, Path)}
    return LoadedGrader(grader, config.model_copy(update=files))


def check_constructors(agent: Agent) -> None:
    """Makes one workflow and one grader, as every rollout does; ConfigError names the one that cannot be made."""
    for cls, config in ((agent.workflow, agent.workflow_config), (agent.grader, agent.grader_config)):
        try:
            _ = cls and cls(deepcopy(config))
        except (KeyboardInterrupt, ConfigError):
            raise
        except BaseException as cause:  # the author's code, as in `import_entry`
            where, name = _where(agent.entry, cause), cls.__name__ if cls else ""
            text = f"{type(cause).__name__}: {cause}".replace("\n", " ")
            raise ConfigError(f"{where}: {name}(config) raised {text}; let __init__ take the config and do little else") from cause


def import_entry(entry: Path) -> ModuleType:
    """Imports the author's file; ConfigError says on which line it failed."""
    if entry.suffix != ".py" or not entry.is_file():
        raise ConfigError(f"{entry}: no such Python file; set [agent] entry to the .py file that holds the workflow and the grader")
    folder = entry.resolve().parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    # The file becomes a module of a package made for its folder, so that relative imports work and equal file names do not clash.
    name = f"penstock_agent_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    spec = importlib.util.spec_from_file_location(f"{name}.{entry.stem}", entry.resolve())
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({name: package, module.__name__: module})
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # whatever the author's file does on import, the user gets one line about it
        raise ConfigError(_import_failure(entry, cause, name)) from cause
    return module


def _import_failure(entry: Path, cause: BaseException, package: str) -> str:
    where, text = _where(entry, cause), f"{type(cause).__name__}: {cause}".replace("\n", " ")
    if isinstance(cause, SyntaxError):
        same = cause.filename == str(entry.resolve())
        where = f"{entry if same else cause.filename}, line {cause.lineno}"
        return f"{where}: SyntaxError: {cause.msg}; fix the file"
    if isinstance(cause, ModuleNotFoundError):
        return f"{where}: {text.replace(f'{package}.', '.')}; {_install_hint(cause.name or '', package, entry)}"
    if isinstance(cause, SystemExit):
        return f"{where}: the file exits when it is imported; keep that under `if __name__ == '__main__':`"
    return f"{where}: {text}; fix what the file does on import"


def _where(entry: Path, cause: BaseException) -> str:
    """Returns the last line of the author's file in the traceback."""
    file = str(entry.resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == file]
    return f"{entry}, line {lines[-1]}" if lines else str(entry)


def _install_hint(module: str, package: str, entry: Path) -> str:
    top, _, below = module.partition(".")
    if top == package:
        return f"put {below.partition('.')[0]}.py next to {entry.name}"
    if top in sys.modules or not top:
        return "check the name, or install a release of its package that has it"
    return f"pip install {PACKAGE_OF_MODULE.get(top, top.replace('_', '-'))}, or put {top}.py next to {entry.name}"


def _members(module: ModuleType) -> Iterator[Any]:
    # Each object once, however many names it has. Callers check `type(member)`: `isinstance` may make a lazy proxy fail.
    yield from {id(value): value for value in vars(module).values()}.values()


def subclasses(module: ModuleType, base: type[T]) -> Iterator[type[T]]:
    """Yields the subclasses of `base` in a module, imported ones too."""
    for member in _members(module):
        if issubclass(type(member), type) and issubclass(member, base) and member is not base:
            yield member


def _only_class(module: ModuleType, base: type[T], entry: Path) -> type[T]:
    found = [m for m in subclasses(module, base) if not inspect.isabstract(m)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(sorted(cls.__name__ for cls in found))
        raise ConfigError(
            f"{entry}: several {base.__name__} subclasses: {names}; keep one, make the others abstract or move them out"
        )
    raise ConfigError(f"{entry}: no concrete {base.__name__} subclass; define one ({_missing_class_hint(module, base)})")


def _missing_class_hint(module: ModuleType, base: type[Any]) -> str:
    for member in subclasses(module, base):
        return f"{member.__name__} still lacks {', '.join(sorted(getattr(member, '__abstractmethods__', ())))}"
    return f"class My{base.__name__}({base.__name__}): …"


def _check_async(cls: type[Any], method: str, entry: Path) -> None:
    if not inspect.iscoroutinefunction(inspect.unwrap(getattr(cls, method))):
        raise ConfigError(f"{entry}: {cls.__name__}.{method} is not async; write `async def {method}(self, ctx)`")


C = TypeVar("C", bound=BaseConfig)


def _config(module: ModuleType, base: type[C], owner: type[Any], section: str, table: Mapping[str, Any], entry: Path) -> C | None:
    found: list[C] = [member for member in _members(module) if issubclass(type(member), base)]
    if len(found) > 1:
        names = ", ".join(sorted(name for name, value in vars(module).items() if issubclass(type(value), base)))
        raise ConfigError(f"{entry}: several {base.__name__} objects: {names}; keep one")
    config = found[0] if found else None
    if table:
        cls = type(config) if config else _config_class(module, base, owner)
        config = _apply(cls, config, table, owner.__name__, section)
    if config is not None:
        _check_name(config, entry)
        _check_copy(config, entry)
    return config


def _config_class(module: ModuleType, base: type[C], owner: type[Any]) -> type[C]:
    """Returns the class that `AgentWorkflow[Config]` names, else the only config class in the file, else `base`."""
    named = [arg for cls in owner.__mro__ for origin in vars(cls).get("__orig_bases__", ()) for arg in get_args(origin)]
    own = [cls for cls in named if inspect.isclass(cls) and issubclass(cls, base)]
    in_file = list(subclasses(module, base))
    return own[0] if own else in_file[0] if len(in_file) == 1 else base


def _apply(cls: type[C], config: C | None, table: Mapping[str, Any], default_name: str, section: str) -> C:
    where = f"[{section}] for {cls.__name__}"
    fields: dict[str, Any] = dict(config) if config else {}
    known = {*cls.model_fields, *fields}
    for key in table:
        if key not in known and not _takes_any_key(cls, fields):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    if cls.model_fields["name"].is_required():
        fields.setdefault("name", default_name)
    return validate(cls, _merged(fields, table), where)


def _takes_any_key(cls: type[BaseConfig], fields: Mapping[str, Any]) -> bool:
    """Returns whether the author defined no fields: then any key of the TOML becomes one."""
    return cls in (AgentWorkflowConfig, GraderConfig) and set(fields) <= set(cls.model_fields)


def _merged(fields: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` with the values of `table`; a nested table changes only the fields that it names."""
    merged = dict(fields)
    for key, value in table.items():
        old = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(old, BaseModel)
        merged[key] = _merged(dict(cast(BaseModel, old)), cast("Mapping[str, Any]", value)) if nested else value
    return merged


def _check_name(config: BaseConfig, entry: Path) -> None:
    if not 1 <= len(config.name.strip()) <= MAX_NAME_CHARS:
        problem = f"{type(config).__name__}.name has {len(config.name)} characters"
        raise ConfigError(f"{entry}: {problem}; give it 1 to {MAX_NAME_CHARS}, not all of them blank")


def _check_copy(config: BaseConfig, entry: Path) -> None:
    try:
        deepcopy(config)
    except Exception as cause:  # a field's own type decides what copying it does
        reason = f"{type(cause).__name__}: {cause}"
        raise ConfigError(
            f"{entry}: {type(config).__name__} cannot be copied for each rollout ({reason}); build such fields in run()"
        ) from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    agent: dict[str, Any]
    """`[agent]` of the TOML."""
    workflow: dict[str, Any]
    grader: dict[str, Any]
    path: list[str]
    """`sys.path`."""

    @classmethod
    def of(cls, agent: Agent) -> Self:
        workflow, grader = agent.tables
        return cls.from_config(agent.source, workflow, grader)

    @classmethod
    def from_config(cls, source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Self:
        """For an agent that is not loaded here."""
        agent = source.model_dump(mode="json")
        return cls(agent=agent, workflow=dict(workflow), grader=dict(grader), path=list(sys.path))

    @classmethod
    def read(cls, text: bytes) -> Self:
        return cls(**json.loads(text))

    def write(self) -> bytes:
        """Returns JSON; a date of the TOML becomes its ISO form, which config classes accept."""
        return json.dumps(asdict(self), default=str).encode()

    def load(self) -> Agent:
        """Loads the agent in this interpreter; see `open_agent`."""
        sys.path[:] = self.path
        return open_agent(AgentSection.model_validate(self.agent), self.workflow, self.grader)
