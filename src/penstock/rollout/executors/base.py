"""What every executor offers: a run of the author's workflow with its model calls sent to the gateway, then a run of the grader."""

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from penstock.config import Section, validate
from penstock.events import Events
from penstock.records import Rollout, Sampling, Task
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.execution import Reward, WorkflowResult
from penstock.rollout.executors import SECTIONS
from penstock.rollout.transcripts import Transcript
from penstock.sdk.clients import Clients
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import RolloutContext
from penstock.sdk.samples import RolloutSample


class Session(Protocol):
    """One rollout's way into the gateway."""

    @property
    def token(self) -> str:
        """The model token: opens model routes for this rollout, nothing else."""
        ...

    @property
    def base_url(self) -> str:
        """Of the OpenAI routes, ending in `/v1`."""
        ...

    @property
    def flow_token(self) -> str:
        """Lets a flow submit, grade and complete this rollout."""
        ...

    @property
    def rollout(self) -> Rollout:
        """Whose session it is."""
        ...

    @property
    def sampling(self) -> Sampling:
        """What holds for calls that do not say otherwise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A session in a form that can be sent to where the author's code runs."""

    rollout: Rollout
    base_url: str
    token: str = field(repr=False)
    flow_token: str = field(default="", repr=False)
    """Empty unless the agent is a trusted one."""
    sampling: Sampling | None = None

    @classmethod
    def of(cls, session: Session, agent: Agent) -> Self:
        """What `agent` may know of a session."""
        return cls(
            rollout=session.rollout,
            base_url=session.base_url,
            token=session.token,
            flow_token=session.flow_token if agent.trusted else "",
            sampling=session.sampling,
        )

    def context(self, clients: Clients) -> RolloutContext:
        """For the author's code to run in."""
        return RolloutContext(
            base_url=self.base_url,
            api_key=self.token,
            rollout_id=self.rollout.id,
            group_id=self.rollout.group_id,
            channel=self.rollout.channel,
            flow_token=self.flow_token,
            sampling=self.sampling,
            clients=clients,
        )


Recorded = Callable[[str], Awaitable[dict[str, Transcript]]]
"""The transcripts that the gateway has recorded of a rollout, by its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What an executor is made of."""

    agent: Agent
    guests: AuthorTasks
    section: Any
    """Its own settings, from `[executor]`: an object of the class that SECTIONS names."""
    recorded: Recorded
    artifacts: Path | None = None
    """Where each rollout gets a folder for its files; None where there are none."""
    grader_timeout_s: float | None = None
    """Deadline of a grader, for an executor that must name it before there is anything to grade."""
    events: Events = field(default_factory=Events)

    def artifacts_dir(self, rollout_id: str) -> AbstractContextManager[Path | None]:
        """The rollout's own folder, removed again if nothing was put there; None where there can be none."""
        return artifacts_dir(self.artifacts, rollout_id)


@contextmanager
def artifacts_dir(root: Path | None, rollout_id: str) -> Generator[Path | None]:
    """The rollout's own folder under `root`, removed again if nothing was put there; None where there can be none."""
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
            with suppress(OSError):
                folder.rmdir()


def read_section(name: str, table: Mapping[str, Any]) -> Any:
    """`[executor]` as the settings of the executor `name`; ConfigError names a key that it does not have."""
    return validate(SECTIONS.load(name) if name in SECTIONS else Section, table, "[executor]")


class Executor(Protocol):
    """A context manager: leaving it lets go of whatever it shares between rollouts."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self, task: Task, session: Session, *, rollout_id: str, timeout_s: float) -> WorkflowResult:
        """Run the workflow on `task` to its end; the deadline counts from when it starts, not from when it waits for its turn.

        Raises TimeoutError past the deadline, EngineError where a failing engine made it fail, WorkflowError where it raised, and
        WorkerLost where the attempt died with what ran it.
        """
        ...

    async def grade(self, task: Task, samples: Mapping[str, RolloutSample], *, rollout_id: str, timeout_s: float) -> list[Reward]:
        """Run the grader on a rollout whose workflow has returned; GraderError or TimeoutError where it gave no usable reward."""
        ...
