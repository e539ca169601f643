"""The interface of executors: run the author's workflow with its model calls sent to the gateway, then run the grader."""

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
from penstock.rollout.scratch import ScratchFolders
from penstock.rollout.transcripts import Transcript
from penstock.sdk.clients import Clients
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import RolloutContext
from penstock.sdk.samples import RolloutSample
from penstock.system.sandbox import Confinement

if TYPE_CHECKING:
    from starlette.types import ASGIApp


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
