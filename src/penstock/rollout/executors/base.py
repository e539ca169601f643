"""What every executor offers: one run of the author's workflow, with its model calls sent to a session of the gateway."""

from types import TracebackType
from typing import Protocol, Self

from penstock.records import Task


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


class Executor(Protocol):
    """A context manager: leaving it lets go of whatever it shares between rollouts."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self, task: Task, session: Session, *, rollout_id: str, timeout_s: float) -> None:
        """Run the workflow on `task` to its end; the deadline counts from when it starts, not from when it waits for its turn.

        Raises TimeoutError past the deadline, EngineError where a failing engine made it fail, WorkflowError where it raised.
        """
        ...
