"""The interface of executors: run the author's workflow with its model calls sent to the gateway, then run the grader.

An agent writes to a scratch folder, apart from the run folder; what it left is moved there at its end. What an executor cannot keep
from agents is said at the start of a run.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from penstock.config import Section, validate
from penstock.events import Events
from penstock.records import RolloutRef, Sampling, Task
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors import EXECUTORS
from penstock.rollout.in_process import Reward, WorkflowResult
from penstock.rollout.transcripts import Transcript
from penstock.sdk.clients import Clients
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import RolloutContext
from penstock.sdk.samples import RolloutSample
from penstock.system.sandbox import Confinement

if TYPE_CHECKING:
    from starlette.types import ASGIApp
import asyncio
import os
import re
import secrets
import shutil
import stat
import sys
import time
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import cached_property
from tempfile import mkdtemp

import penstock
from penstock.config import scratch_folder
from penstock.sdk.command import CommandWorkflow, program_file
from penstock.system.async_tools import finish_shielded
from penstock.system.files import FileLock
from penstock.system.sandbox import Sandbox, SandboxWish, choose_sandbox

PREFIX = "penstock-scratch-"
LOCK = ".lock"
YOUNG_S = 60.0
"""A root that is younger may not be locked yet by the process that made it."""


class ScratchFolders:
    """The scratch folders of one process. Their common root is removed with this object, and by a later process after a kill."""

    def __init__(self, events: Events | None = None) -> None:
        self._events = events or Events()

    @cached_property
    def root(self) -> Path:
        """Other users may enter it, since an agent may run as one, but not list it."""
        place = scratch_folder()
        _remove_stale(place)
        root = Path(mkdtemp(prefix=PREFIX, dir=place))
        self._lock = FileLock(root / LOCK)
        self._lock.try_acquire()
        root.chmod(0o711)
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        return root

    @asynccontextmanager
    async def folder_for(self, destination: Path | None) -> AsyncGenerator[Path | None]:
        """Yields the path of a folder of that name, to be made; on exit it is moved to `destination`. None yields None."""
        if destination is None:
            yield None
            return
        folder = self.root.joinpath(secrets.token_hex(16), destination.name)
        try:
            yield folder
        finally:
            if folder.exists():
                await finish_shielded(asyncio.to_thread(self._collect, folder, destination))

    def _collect(self, folder: Path, destination: Path) -> None:
        if left_out := make_safe(folder):
            self._events.emit("artifacts.left_out", rollout_id=destination.name, names=left_out[:20], count=len(left_out))
        try:
            move_folder(folder, destination)
        except OSError as error:  # a full disk: the rollout counts all the same
            self._events.emit("artifacts.lost", rollout_id=destination.name, message=str(error))
        shutil.rmtree(folder.parent, ignore_errors=True)


def make_safe(folder: Path) -> list[str]:
    """Removes links that lead out of the folder and all that is no file or folder; returns their names. The rest becomes ours.

    A reader who follows no more than what is left stays in the folder, and waits for nobody.
    """
    top, removed = folder.resolve(), list[str]()
    for path in _entries(folder):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            inside = not path.readlink().is_absolute() and path.resolve().is_relative_to(top)
        else:
            inside = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
        if not inside:
            path.unlink()
            removed.append(str(path.relative_to(folder)))
        elif os.geteuid() == 0 and path.lstat().st_uid != 0:
            os.chown(path, 0, 0, follow_symlinks=False)
    with suppress(OSError):
        if os.geteuid() == 0:
            os.chown(folder, 0, 0)
        folder.chmod(0o755)
    return removed


def move_folder(folder: Path, destination: Path) -> None:
    """Moves a folder to where there is none, or adds its files to those that are there; an empty one is removed."""
    if not any(folder.iterdir()):
        folder.rmdir()
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.rename(destination)
    except OSError:  # it is on another disk, or the destination has files
        shutil.copytree(folder, destination, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _entries(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place) / name for name in (*folders, *files))


def _remove_stale(place: Path) -> None:
    """Removes what killed processes of this user left behind."""
    for root in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            known = root.lstat()
            if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid() or time.time() - known.st_mtime < YOUNG_S:
                continue
            with FileLock(root / LOCK, create=False) as lock:
                if lock.try_acquire():
                    shutil.rmtree(root, ignore_errors=True)


class GatewaySession(Protocol):
    """One rollout's session on the gateway."""

    @property
    def token(self) -> str:
        """The model token: opens the model routes for this rollout, nothing else."""
        ...

    @property
    def base_url(self) -> str:
        """The address of the OpenAI routes, ending in `/v1`."""
        ...

    @property
    def flow_token(self) -> str:
        """Lets a flow submit, grade and complete this rollout."""
        ...

    @property
    def rollout(self) -> RolloutRef: ...

    @property
    def sampling(self) -> Sampling:
        """The defaults for calls that do not set their own sampling."""
        ...

    def branch_problem(self, *, ended: bool) -> str:
        """Why the rollout is void, as a branch (`Rollout.branch`) that left the record; empty if it is not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """A gateway session as plain values, to be sent to the process that runs the author's code."""

    rollout: RolloutRef
    base_url: str
    token: str = field(repr=False)
    flow_token: str = field(default="", repr=False)
    """Empty unless the agent is a trusted one."""
    sampling: Sampling | None = None

    @classmethod
    def of(cls, session: GatewaySession, agent: Agent) -> Self:
        """The parts of `session` that `agent` may see."""
        return cls(
            rollout=session.rollout,
            base_url=session.base_url,
            token=session.token,
            flow_token=session.flow_token if agent.trusted else "",
            sampling=session.sampling,
        )

    def context(self, clients: Clients, confinement: Confinement | None = None) -> RolloutContext:
        """Returns the context that the author's code runs in; its programs are started in `confinement`."""
        return RolloutContext(
            base_url=self.base_url,
            api_key=self.token,
            rollout_id=self.rollout.id,
            group_id=self.rollout.group_id,
            channel=self.rollout.channel,
            flow_token=self.flow_token,
            sampling=self.sampling,
            clients=clients,
            confinement=confinement,
        )


LoadTranscripts = Callable[[str], Awaitable[dict[str, Transcript]]]
"""Loads the transcripts that the gateway has recorded of a rollout, by the rollout's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorContext:
    """What an executor is made with."""

    agent: Agent
    author_tasks: AuthorTasks
    section: Any
    """The settings from `[executor]`: an object of the executor class's own `section`."""
    load_transcripts: LoadTranscripts
    artifacts: Path | None = None
    """The folder that holds one artifacts folder per rollout; None: rollouts get none."""
    grader_timeout_s: float | None = None
    """The grader's deadline, for an executor that must send it before there is anything to grade."""
    events: Events = field(default_factory=Events)
    hidden: tuple[Path, ...] = ()
    """Files and folders that no agent may read, wherever the machine can keep them from it: the run's own, and the datasets."""
    scratch: ScratchFolders = field(default_factory=ScratchFolders)
    app: "ASGIApp | None" = None
    """The gateway, for agents that run in its event loop."""

    def workflow_dir(self, rollout_id: str) -> AbstractAsyncContextManager[Path | None]:
        """See `ScratchFolders.folder_for`: a workflow writes there, and finds no way to the run folder."""
        return self.scratch.folder_for(self.artifacts and self.artifacts / rollout_id)

    def artifacts_dir(self, rollout_id: str) -> AbstractContextManager[Path | None]:
        """See `artifacts_dir`."""
        return artifacts_dir(self.artifacts, rollout_id)


@contextmanager
def artifacts_dir(root: Path | None, rollout_id: str) -> Generator[Path | None]:
    """Makes the rollout's folder under `root`, and removes it on exit if it is empty. Yields None if it cannot be made."""
    folder = root and root / rollout_id
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            with suppress(OSError):  # rmdir refuses a folder that is not empty
                folder.rmdir()


class Executor(Protocol):
    """Runs workflows and graders. A context manager: leaving it releases what its rollouts share."""

    section: ClassVar[type[Section]] = Section
    """The class of its settings under `[executor]`; the plain `Section` takes no keys."""
    runs_elsewhere: ClassVar[bool] = False
    """Whether agents run in processes that outlive a rollout and are shared: several evaluation processes gain nothing then."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self, task: Task, session: GatewaySession, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        """Runs the workflow on `task`. The deadline counts from when it starts, not while it waits for a slot.

        Raises TimeoutError past the deadline, EngineError if a failing engine made it fail, WorkflowError if it raised, and
        WorkerLost if the process that ran it died.
        """
        ...

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        """Runs the grader on a rollout whose workflow has returned. Raises GraderError or TimeoutError without a usable reward."""
        ...


def read_section(name: str, table: Mapping[str, Any]) -> Any:
    """Reads `[executor]` as the settings of the executor `name`; ConfigError names an unknown key."""
    return validate(getattr(EXECUTORS.load(name), "section", Section), table, "[executor]")


PACKAGE = Path(penstock.__file__).parent
TOOLS = re.compile(
    r"\bsubprocess\b|\bos\.(system|popen|exec|spawn|posix_spawn)|create_subprocess_|\bpty\b|\bshell\b|(?<![.\w])(eval|exec)\("
    r"|ShellTool|PythonREPL|python_repl|FileManagementToolkit|file_write|strands_tools|CodeInterpreter",
    re.IGNORECASE,
)
"""Marks an agent's file that lets the policy run programs or code; best effort."""
REMEDY = 'set rollout.executor = "process"'


def starts_programs(context: ExecutorContext) -> bool:
    """Whether each rollout is a program, which can be started in a sandbox."""
    return issubclass(context.agent.workflow, CommandWorkflow)


def confine_programs(context: ExecutorContext, wish: SandboxWish) -> Confinement:
    """Chooses the sandbox for an agent's programs, and says what it does not keep from them."""
    agent = context.agent
    sandbox = choose_program_sandbox(agent, wish)
    confinement = Confinement(
        sandbox=sandbox,
        hidden=(*context.hidden, context.scratch.root),
        readonly=tuple(path for path in (agent.entry, PACKAGE) if path.exists()),
        visible=visible_paths(context),
    )
    announce_sandbox(context, sandbox)
    return confinement


def choose_program_sandbox(agent: Agent, wish: SandboxWish) -> Sandbox:
    """Chooses the sandbox for the programs of an agent's command."""
    return choose_sandbox(wish, needs=[agent.source.folder, program_file(agent.source)])


def visible_paths(context: ExecutorContext) -> tuple[Path, ...]:
    """Returns what an agent needs that is inside of a hidden folder."""
    hidden = [path.resolve() for path in context.hidden]
    needed = {path.resolve() for path in (context.agent.entry.parent, context.agent.source.folder, Path.cwd(), Path(sys.prefix))}
    return tuple(sorted(path for path in needed if any(path.is_relative_to(each) for each in hidden)))


def announce_sandbox(context: ExecutorContext, sandbox: Sandbox) -> None:
    """Says in one line what agents can reach, if that is more than nothing."""
    if text := sandbox_notice(sandbox, context.hidden):
        context.events.emit("notice", text=text)


def sandbox_notice(sandbox: Sandbox, hidden: Iterable[Path]) -> str:
    """What agents can reach in a sandbox, in one line; empty if it is nothing."""
    if not sandbox.isolates:
        return f"agents run without a sandbox ({sandbox.reason}): they can read the run's files, labels included, and each other"
    if sandbox.name != "user":
        return ""
    text = "agents run under user ids of their own: they write to their artifacts folder and to /tmp"
    if exposed := sandbox.exposed(hidden):
        files = ", ".join(map(str, exposed))
        text += f", and can read what every user can; hide it with: chmod -R o-rwx {files}"
    return text


def announce_trusted(context: ExecutorContext, executor: str = "inline") -> None:
    """Says that an agent is trusted, if it looks like one that runs programs or code for the policy."""
    home = context.agent.entry.parent.resolve()
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {Path(file) for file in modules if file and file.endswith(".py")} | {context.agent.entry.resolve()}
    for file in sorted(file for file in files if file.parent == home and file.is_file()):
        if found := TOOLS.search(file.read_text(errors="replace")):
            trusted = f"{file.name} has {found[0]!r}: {executor} agents are trusted with the memory and files of their process"
            return context.events.emit("notice", text=f"{trusted}; if tools run what the policy writes, {REMEDY}")
    return None
