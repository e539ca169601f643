"""The Python API: `train`, `evaluate` and `load_run`, for scripts and notebooks. The commands call the same functions."""

import asyncio
import hashlib
import importlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypedDict, TypeVar, Unpack, cast

import orjson

from penstock.config import AgentSection, RunConfig, make_config
from penstock.errors import ConfigError, DatasetError
from penstock.pool.location import find_pool, open_pool_at
from penstock.records import Group, Rollout, Step, Task
from penstock.registry import Registry
from penstock.run.folder import RunFolder
from penstock.run.inputs import read_inputs
from penstock.sdk.discovery import GRADERS, Agent, find_agent, import_entry, subclasses
from penstock.sdk.workflow import AgentWorkflow, BaseConfig, Grader
from penstock.system.async_tools import GRACE_S, TERMINATE_S, Interrupts, LeavableThreads
from penstock.system.files import write_file

if TYPE_CHECKING:
    import pandas

    from penstock.evals.run import Evaluation
    from penstock.train.trainer import Summary

T = TypeVar("T")
AgentLike = type[AgentWorkflow[Any]] | AgentWorkflow[Any] | Callable[[Any], Awaitable[Any]] | str | Path | Mapping[str, Any]
"""A workflow, an async function of its context, `module:attr`, the path of a Python file, or the `[agent]` table."""
GraderLike = type[Grader] | Grader | Callable[[Any], Any] | str | Mapping[str, Any]
"""A grader, a function of its context that returns a number, `module:attr`, a built-in grader's name, or the `[grader]` table."""
Tasks = str | Path | Iterable[Mapping[str, Any] | Task]
"""The path of a dataset file, or its rows."""
Table = Mapping[str, Any]
NOTEBOOK = Path("notebook")
"""In place of the entry file of an agent that is defined in a notebook."""
REFRESH_S = 0.25
PAGE_GROUPS = 8


class Sections(TypedDict, total=False):
    """The tables of a config file. Where a table has a name, text stands for it: `model="tiny"`."""

    run: str | Table
    model: str | Table
    engine: str | Table
    pool: str | Table
    scale: str | Table
    dataset: Table
    rollout: Table
    sampling: Table
    train: Table
    eval: Table
    gateway: Table
    track: Table
    policies: Table
    executor: Table
    workflow: Table


class ProgressView(Protocol):
    """Shows the progress of a run from its events."""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...

    def announce_stop(self) -> None:
        """Called when the run was asked to stop."""
        ...

    def refresh(self) -> None:
        """Draws again, if nothing else does."""
        ...

    def show(self, text: str) -> None:
        """Prints the result."""
        ...


# Training and evaluation


def train(
    agent: AgentLike | None = None,
    grader: GraderLike | None = None,
    tasks: Tasks | None = None,
    *,
    eval_tasks: Tasks | None = None,
    config: str | Path | RunConfig | None = None,
    folder: str | Path | None = None,
    fresh: bool = False,
    allow_code_change: bool = False,
    progress: "bool | ProgressView" = True,
    **sections: Unpack[Sections],
) -> "Summary":
    """Trains the policy of an agent and returns the run's summary. Call it again with the same folder to resume a run.

    Options are the tables of a config file as keywords (`train={"steps": 5}`), or a file (`config="train.toml"`) with keywords
    on top. `folder` is the run's folder, `runs/run` by default. `eval_tasks` are evaluated before and after training. `fresh`
    starts over and keeps the old folder. `allow_code_change` resumes though the agent or grader was edited.

    Ctrl-C, or interrupting the kernel, stops after the running step; a second one stops at once. Works in a running event loop.
    """
    from penstock.train.algorithm import check_algorithm
    from penstock.view.live import LiveView, RunState
    from penstock.view.summary import result_text

    options = _read_options("train", agent, grader, tasks, eval_tasks, config, folder, sections)
    settings = options.config
    rollouts = settings.rollout.group_size * settings.rollout.groups_per_step
    view = _view(progress, lambda: LiveView(RunState(rollouts_per_step=rollouts)))
    with view:
        inputs = read_inputs(settings, view, check=check_algorithm, agent=options.agent)
        # torch is loaded here, after everything that can be rejected without it
        if settings.scale.name == "ray":
            from penstock.scale.run import train_on_ray as run
        else:
            from penstock.train.trainer import train as run

        def work(stop: asyncio.Event) -> "Coroutine[Any, Any, Summary]":
            return run(settings, inputs, listener=view, stop=stop, fresh=fresh, allow_code_change=allow_code_change)

        summary = _run_interruptibly(work, view)
    if progress is True:
        view.show(result_text(summary))
    return summary


def evaluate(
    agent: AgentLike | None = None,
    grader: GraderLike | None = None,
    tasks: Tasks | None = None,
    *,
    config: str | Path | RunConfig | None = None,
    folder: str | Path | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    progress: "bool | ProgressView" = True,
    **sections: Unpack[Sections],
) -> "Evaluation":
    """Runs an agent on tasks, grades it and returns the evaluation. Call it again with the same folder to resume.

    Takes the same options as `train`. `folder` is the evaluation's folder, `runs/evals/run` by default. `retry_failed` repeats
    rollouts that failed. Ctrl-C stops at once; rollouts that have ended are kept.
    """
    from penstock.evals.run import evaluate as run
    from penstock.evals.run import evaluation_config
    from penstock.train.algorithm import check_algorithm  # the file is that of a training run, so all of it is checked
    from penstock.view.eval_view import EvalView, as_text

    options = _read_options("eval", agent, grader, None, tasks, config, folder, sections)
    settings = evaluation_config(options.config)
    if folder is not None:
        settings = settings.model_copy(update={"run": options.config.run})
    view = _view(progress, EvalView)
    with view:
        inputs = read_inputs(settings, view, check=check_algorithm, all_heldout=True, agent=options.agent)

        def work(stop: asyncio.Event) -> "Coroutine[Any, Any, Evaluation]":
            return run(settings, inputs, listener=view, stop=stop, fresh=fresh, retry_failed=retry_failed)

        found = _run_interruptibly(work, view)
    if progress is True:
        view.show(as_text(found, None))
    return found


class QuietView:
    """Shows nothing."""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None: ...
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...
    def announce_stop(self) -> None: ...
    def refresh(self) -> None: ...
    def show(self, text: str) -> None: ...


def _view(progress: bool | ProgressView, default: Callable[[], ProgressView]) -> ProgressView:
    if isinstance(progress, bool):
        return default() if progress else QuietView()
    return progress


# Options


class Options(NamedTuple):
    config: RunConfig
    agent: Agent | None
    """An agent made from objects; None for one that `config.agent` names."""


def _read_options(
    kind: str,
    agent: AgentLike | None,
    grader: GraderLike | None,
    tasks: Tasks | None,
    eval_tasks: Tasks | None,
    config: str | Path | RunConfig | None,
    folder: str | Path | None,
    sections: Sections,
) -> Options:
    tree = _tree(agent, grader, folder, sections)
    rows = {"train": _rows(tasks), "eval": _rows(eval_tasks)}
    if kind == "eval" and config is None:
        rows["train"] = rows["eval"]
    for name, given in rows.items():
        if given is not None:
            tree.setdefault("dataset", {})[name] = str(given) if isinstance(given, Path) else "tasks"  # the rows' file follows
    settings = _load(kind, config, tree)
    files = {name: _write_rows(settings.run.folder, given) for name, given in rows.items() if isinstance(given, bytes)}
    settings = settings.model_copy(update={"dataset": settings.dataset.model_copy(update=files)})
    made = _make_agent(agent, grader, settings)
    if made is not None:
        settings = settings.model_copy(update={"agent": made.source})
    return Options(settings, made)


def _tree(agent: AgentLike | None, grader: GraderLike | None, folder: str | Path | None, sections: Sections) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, given in sections.items():
        tree[name] = {"name": given} if isinstance(given, str) else given
    for name, given in (("agent", agent), ("grader", grader)):
        if isinstance(given, Mapping):
            tree[name] = {**given}
    if _is_file(agent):
        tree["agent"] = {"entry": str(agent)}
    if isinstance(grader, str) and ":" not in grader:
        GRADERS.check(grader)
        tree["grader"] = {"name": grader}
    if folder is not None:
        path = Path(folder)
        tree["run"] = {**tree.get("run", {}), "folder": str(path.parent), "name": path.name}
    return tree


def _load(kind: str, config: str | Path | RunConfig | None, tree: dict[str, Any]) -> RunConfig:
    if isinstance(config, RunConfig):
        return make_config(_merged(config.model_dump(mode="json"), tree), "the config") if tree else config
    if config is None:
        return make_config(tree, f"penstock.{'train' if kind == 'train' else 'evaluate'}")
    from penstock.run.inputs import load_run_config

    for table, key in (("agent", "entry"), ("dataset", "train"), ("dataset", "eval")):  # from here, not from the file's folder
        if isinstance(tree.get(table), dict) and isinstance(path := tree[table].get(key), str):
            tree[table][key] = str(Path(path).absolute())
    overrides = [f"{key}={orjson.dumps(value, default=str).decode()}" for key, value in _flat(tree)]
    return load_run_config(Path(config), overrides, "train" if kind == "train" else "eval")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _flat(cast("Table", value), f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return found


def _merged(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(tree)
    for key, value in changes.items():
        old = both.get(key)
        nested = isinstance(old, dict) and isinstance(value, Mapping)
        both[key] = _merged(cast("dict[str, Any]", old), cast("Table", value)) if nested else value
    return both


def _rows(tasks: Tasks | None) -> Path | bytes | None:
    """Returns the path of a dataset, or the JSON lines of its rows."""
    if tasks is None or isinstance(tasks, str | Path):
        return None if tasks is None else Path(tasks)
    lines = list[bytes]()
    for number, task in enumerate(tasks):
        row = {"prompt": task.prompt, "label": task.label, "metadata": task.metadata} if isinstance(task, Task) else task
        try:
            lines.append(orjson.dumps({**row}))
        except (TypeError, orjson.JSONEncodeError) as cause:
            raise DatasetError(f"tasks[{number}] cannot be written as JSON: {cause}; use text, numbers, lists and dicts") from cause
    return b"\n".join(lines) + b"\n"


def _write_rows(runs: Path, rows: bytes) -> Path:
    """Keeps rows that were given as objects next to the runs, by digest, so that a run can be resumed and inspected."""
    file = runs / ".tasks" / f"{hashlib.sha256(rows).hexdigest()[:16]}.jsonl"
    if not file.exists():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, rows)
        except OSError as cause:
            raise ConfigError(f"{file}: cannot be written: {cause.strerror}; set run.folder to a writable place") from cause
    return file


# Agents made from objects


def _is_file(agent: AgentLike | None) -> bool:
    return isinstance(agent, Path) or (isinstance(agent, str) and agent.endswith(".py"))


def _make_agent(agent: AgentLike | None, grader: GraderLike | None, config: RunConfig) -> Agent | None:
    """Returns an agent of the objects given; None if the config names all of it."""
    named_agent = agent is None or isinstance(agent, Mapping) or _is_file(agent)
    named_grader = grader is None or isinstance(grader, Mapping) or (isinstance(grader, str) and ":" not in grader)
    if named_agent and named_grader:
        return None
    if config.rollout.executor != "inline" or config.scale.name != "none":
        place = "scale.name = 'ray'" if config.scale.name != "none" else f"rollout.executor = {config.rollout.executor!r}"
        text = f"{place} loads the agent in another process, where objects of this one do not exist"
        raise ConfigError(f"{text}; put workflow and grader into a Python file and give its path: agent='agent.py'")
    given = None if named_agent else _loaded("agent", agent)
    graded_by = None if named_grader else _loaded("grader", grader)
    module = ModuleType("penstock_agent")
    if named_agent:
        entry = config.agent.entry
        if config.agent.command or config.agent.flow or config.agent.flows:
            raise ConfigError("a grader object needs a workflow; name the grader in the config file instead")
        kept = {name: value for name, value in vars(import_entry(entry)).items() if not _is_subclass(value, Grader)}
        vars(module).update(kept)
    else:
        entry = _entry(given)
        _add(module, _workflow(given), given)
    if not named_grader:
        _add(module, _grader(graded_by), graded_by)
    elif not named_agent and not config.grader.get("name"):
        raise ConfigError("no grader was given; pass a Grader class, a function that returns a number, or a built-in grader's name")
    found = find_agent(module, AgentSection(entry=entry), config.workflow, config.grader)
    sources = dict[str, str]()
    for each in (given, graded_by):
        if each is not None:
            _add_sources(each, sources)
    return replace(found, sources=sources)


def _loaded(kind: str, given: Any) -> Any:
    return Registry(kind, {}).load(given) if isinstance(given, str) else given


def _is_subclass(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _entry(given: Any) -> Path:
    """Returns the file that defines an object, or `NOTEBOOK`."""
    file = _file(given)
    if file is None:
        return NOTEBOOK
    with suppress(ValueError):
        return file.relative_to(Path.cwd())
    return file


def _file(given: Any) -> Path | None:
    module = sys.modules.get(getattr(given, "__module__", ""))
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _add(module: ModuleType, cls: type[Any], given: Any) -> None:
    """Adds a class to the agent's module, with the configs of the file that defines it, as if that were the entry file."""
    own = sys.modules.get(getattr(given, "__module__", ""))
    configs = list(subclasses(own, BaseConfig)) if own is not None else []
    if not isinstance(given, type) and isinstance(config := getattr(given, "config", None), BaseConfig):
        configs += [type(config)]
        vars(module)[f"{cls.__name__}_config"] = config
    elif isinstance(given, type) and own is not None and _file(given):
        vars(module).update({name: value for name, value in vars(own).items() if issubclass(type(value), BaseConfig)})
    vars(module).update({config.__name__: config for config in configs}, **{cls.__name__: cls})


def _workflow(given: Any) -> type[AgentWorkflow[Any]]:
    if _is_subclass(given, AgentWorkflow):
        return given
    if isinstance(given, AgentWorkflow):
        workflow = _copied(cast("AgentWorkflow[Any]", given))

        async def run(self: Any, ctx: Any) -> Any:
            return await _copied(workflow).run(ctx)

        return type(type(workflow).__name__, (AgentWorkflow,), {"run": run})
    if not inspect.iscoroutinefunction(given):
        raise ConfigError(f"agent = {given!r} is no agent; pass an AgentWorkflow, `async def agent(ctx)`, or a Python file's path")

    async def call(self: Any, ctx: Any) -> Any:
        return await given(ctx)

    return type(given.__name__, (AgentWorkflow,), {"run": call})


def _grader(given: Any) -> type[Grader]:
    if _is_subclass(given, Grader):
        return given
    if isinstance(given, Grader):
        grader = _copied(given)

        async def grade(self: Any, ctx: Any) -> Any:
            return await _copied(grader).grade(ctx)

        return type(type(grader).__name__, (Grader,), {"grade": grade})
    if isinstance(given, type) or not callable(given):
        raise ConfigError(f"grader = {given!r} is no grader; pass a Grader, or a function of its context that returns a number")

    async def call(self: Any, ctx: Any) -> None:
        reward: Any = given(ctx)
        reward = await reward if inspect.isawaitable(reward) else reward
        if reward is not None:  # else it has set rewards itself
            ctx.set_reward(float(reward) if isinstance(reward, bool) else reward)

    return type(getattr(given, "__name__", "grader"), (Grader,), {"grade": call})


def _copied(given: T) -> T:
    try:
        return deepcopy(given)
    except Exception as cause:  # a field's own type decides what copying it does
        name = type(given).__name__
        raise ConfigError(
            f"{name} cannot be copied for each rollout ({cause}); pass the class, or build such fields in run"
        ) from cause


def _add_sources(given: Any, found: dict[str, str]) -> None:
    """Adds the source of an object, and of what it uses from its own module, by name: a run reports if they change."""
    thing = given if isinstance(given, type | FunctionType) else type(given)
    name = thing.__qualname__
    if name in found:
        return
    found[name] = _source(thing)
    functions = [value for value in vars(thing).values() if isinstance(value, FunctionType)] if isinstance(thing, type) else [thing]
    for function in functions:
        for used in _used_names(function.__code__):
            value = function.__globals__.get(used)
            if isinstance(value, type | FunctionType) and value.__module__ == thing.__module__:
                _add_sources(value, found)


def _used_names(code: Any) -> set[str]:
    return {*code.co_names, *(name for inner in code.co_consts if hasattr(inner, "co_names") for name in _used_names(inner))}


def _source(thing: Any) -> str:
    with suppress(OSError, TypeError):
        return inspect.getsource(thing)
    methods = [value for value in vars(thing).values() if isinstance(value, FunctionType)] if isinstance(thing, type) else []
    with suppress(OSError, TypeError):  # a class of a notebook has no file, its functions do
        return "\n".join(inspect.getsource(method) for method in methods)
    return ""


# Running


def _run_interruptibly(work: Callable[[asyncio.Event], Coroutine[Any, Any, T]], view: ProgressView) -> T:
    """Runs `work` to its end. Ctrl-C sets its stop event; a second one cancels it and raises KeyboardInterrupt."""
    if threading.current_thread() is threading.main_thread() and not _loop_runs():

        async def main() -> T:
            stop = asyncio.Event()
            with Interrupts(stop, view.announce_stop, terminate_s=TERMINATE_S):
                return await work(stop)

        try:
            return asyncio.run(main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    return WorkThread(work).wait(view)


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class WorkThread:
    """Runs work in an event loop of another thread: the calling one has its own, as in a notebook, or is not the main thread."""

    def __init__(self, work: Callable[[asyncio.Event], Coroutine[Any, Any, Any]]) -> None:
        self._work, self._ready, self._done = work, threading.Event(), threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="penstock-run", daemon=True).start()

    def wait(self, view: ProgressView) -> Any:
        interrupted = 0
        while True:
            try:
                while not self._done.wait(REFRESH_S):
                    view.refresh()
                break
            except KeyboardInterrupt:
                interrupted += 1
                self._ready.wait(GRACE_S)
                if interrupted == 1:
                    self._loop.call_soon_threadsafe(self._stop.set)
                    view.announce_stop()
                else:
                    self._loop.call_soon_threadsafe(self._task.cancel)
                    self._done.wait(GRACE_S)
                    raise
        if isinstance(self._error, asyncio.CancelledError):
            raise KeyboardInterrupt from None
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = asyncio.run(self._main())
        except BaseException as error:  # it is raised in the thread that waits
            self._error = error
        self._done.set()

    async def _main(self) -> Any:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_default_executor(LeavableThreads())
        self._task = asyncio.ensure_future(self._work(self._stop))
        self._ready.set()
        return await self._task


# Recorded runs


class Token(NamedTuple):
    """One sampled token."""

    rollout_id: str
    step: int
    position: int
    """In the reply, 0-based."""
    token_id: int
    logprob: float
    policy_version: int


class Records(list[T]):
    """A list of records; `to_pandas()` makes a table of them."""

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns a DataFrame with a row for each record; ConfigError if pandas is not installed."""
        try:
            frame = importlib.import_module("pandas").DataFrame
        except ModuleNotFoundError as cause:
            raise ConfigError("a DataFrame needs pandas; install it with: pip install pandas") from cause
        return frame([_row(record) for record in self])


class LoadedRun:
    """What a run or an evaluation has recorded so far. Each method reads the folder again."""

    def __init__(self, folder: Path) -> None:
        self._location = find_pool(folder)
        self._files = RunFolder(folder, resumed=True)
        self.folder = folder

    @property
    def kind(self) -> str:
        """`train`, `eval` or `gateway`."""
        return self._files.kind

    @property
    def config(self) -> RunConfig:
        """The options that it was started with."""
        return self._files.config()

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of when it last ended."""
        return self._files.summary()

    def metrics(self) -> Records[dict[str, Any]]:
        """Returns one record for each training step."""
        return Records(self._files.metrics())

    def evaluations(self) -> dict[str, float | None]:
        """Returns held-out rewards by time, such as `before-0` or `during-8`; None where one was skipped or failed."""
        return self._files.evaluations()

    def groups(self, channel: str | None = None) -> Records[Group]:
        """Returns all tasks that were run, each with its rollouts; those of one channel, such as `train`, if it is named."""
        return _run_apart(self._groups(channel))

    def rollouts(self, channel: str | None = None) -> Records[Rollout]:
        """Returns all rollouts with their steps and grades."""
        return Records(rollout for group in self.groups(channel) for rollout in group.rollouts)

    def steps(self, channel: str | None = None) -> Records[Step]:
        """Returns all model calls."""
        return Records(step for rollout in self.rollouts(channel) for step in rollout.steps)

    def tokens(self, channel: str | None = None) -> Records[Token]:
        """Returns all sampled tokens."""
        found = Records[Token]()
        for step in self.steps(channel):
            tokens = zip(step.completion_ids, step.logprobs, step.versions, strict=True)
            found += [Token(step.rollout_id, step.index, position, *token) for position, token in enumerate(tokens)]
        return found

    async def _groups(self, channel: str | None) -> Records[Group]:
        found = Records[Group]()
        async with open_pool_at(self._location) as pool:
            for name in [channel] if channel else await pool.channels():
                seq = 0
                while page := await pool.groups(name, first_seq=seq, limit=PAGE_GROUPS):
                    found += page
                    seq = page[-1].seq + 1
        return found

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.folder)!r}, kind={self.kind!r})"


def load_run(folder: str | Path) -> LoadedRun:
    """Opens the folder of a run or an evaluation for reading, also while it runs; ConfigError if it is none."""
    return LoadedRun(Path(folder))


def _run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Runs short work, also where an event loop is running."""
    if not _loop_runs():
        return asyncio.run(work)
    return WorkThread(lambda stop: work).wait(QuietView())


def _row(record: Any) -> Any:
    match record:
        case Rollout():
            return {
                "rollout_id": record.ref.id,
                "group_id": record.ref.group_id,
                "task_id": record.ref.task_id,
                "channel": record.ref.channel,
                "end": record.end and record.end.value,
                "reward": record.reward,
                **record.components,
                "steps": len(record.steps),
                "tokens": sum(step.sampled for step in record.steps),
                "message": record.message,
            }
        case Step():
            return {
                "rollout_id": record.rollout_id,
                "step": record.index,
                "transcript": record.transcript,
                "policy_version": record.versions[-1] if record.versions else None,
                "tokens": record.sampled,
                "finish": record.finish,
                "seconds": record.seconds,
                "reply": record.message.get("content"),
            }
        case Group():
            return {
                "group_id": record.id,
                "channel": record.channel,
                "task_id": record.task.id,
                "prompt": list(record.task.prompt),
                "label": record.task.label,
                "rewards": record.rewards,
            }
        case _:
            return record._asdict() if isinstance(record, Token) else record
