"""Every error that penstock raises on purpose, and the boundary that turns foreign errors into them.

    PenstockError
    ├── ConfigError      a file, key, flag or name that the user gave       → exit code 2
    ├── DatasetError     a row that cannot be a task                        → exit code 2
    ├── ModelError       a model that cannot be found, fetched or read      → exit code 2
    ├── EngineError      the engine failed; the rollout ends, others continue
    │   ├── EngineBusy   its queue is full; try again later
    │   └── EngineRefused  it cannot serve this request, whatever is tried; the agent gets the error
    ├── RenderError      messages that the chat template cannot take        → HTTP 400
    ├── RequestError     a request that a server of ours refuses            → its own HTTP status and code
    ├── ControllerError  what a controller answered, or that there is none  → its own code
    ├── WorkflowError    the author's agent raised
    ├── WorkerLost       the process that ran the agent died; the attempt is made again elsewhere
    ├── GraderError      the author's grader raised, or gave no finite reward
    ├── PoolError        the store refused or failed
    │   ├── PoolConflict another value is stored under the same id
    │   ├── PoolFailed   the store itself failed: a full disk, a server that is away; try again later
    │   └── PoolFull     too many groups wait to be trained; try again later
    └── TrainError       training cannot continue

Authors raise ordinary Python errors; `boundary` names them once. A message says what happened, to which thing, and what to do.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple


class PenstockError(Exception):
    """Base of all errors that carry a message meant for a person."""


class Issue(NamedTuple):
    """One mistake in the user's input."""

    key: str
    """A key such as `train.lr`, a row such as `row 17`, or a file."""
    message: str
    """What is wrong, and what to do."""
    correction: str | None = None
    """The key that was probably meant."""

    @property
    def line(self) -> str:
        return f"{self.message}; did you mean {self.correction!r}?" if self.correction else self.message


class ConfigError(PenstockError):
    """The user's input cannot be used; `issues` lists the mistakes if there are more than the message says."""

    def __init__(self, message: str, issues: Sequence[Issue] = ()) -> None:
        super().__init__(message)
        self.issues = tuple(issues)


class DatasetError(ConfigError):
    """A dataset or one of its rows cannot be used."""


class ModelError(ConfigError):
    """A model reference cannot be resolved, fetched or read."""


class EngineError(PenstockError):
    """The engine could not finish a request."""


class EngineBusy(EngineError):
    """The engine's queue is full."""

    def __init__(self, message: str, *, status: int = 503, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        """What a caller is answered: 429 if the engine said so."""
        self.retry_after_s = retry_after_s
        """When to try again, as the engine said; 0 if it did not."""


class EngineRefused(EngineError):
    """The engine cannot serve this request as it is."""


class RenderError(PenstockError):
    """The messages cannot be rendered for this model."""


class RequestError(PenstockError):
    """A request that a server of ours refuses, with the HTTP status and the code a client can act on."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        """When the same request may be sent again; 0 if nothing is known."""


class ControllerError(PenstockError):
    """A controller refused a request or cannot be reached; `details` is its answer."""

    def __init__(self, message: str, *, code: str, status: int | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.details = dict(details or {})


class WorkflowError(PenstockError):
    """The author's agent raised."""


class WorkerLost(PenstockError):
    """The process that ran the author's agent is gone, through no fault of the agent."""


class GraderError(PenstockError):
    """The author's grader raised or gave no usable reward."""


class PoolError(PenstockError):
    """The pool refused or failed."""


class PoolConflict(PoolError):
    """Another value is stored under the same id, and stays."""


class PoolFailed(PoolError):
    """The store cannot be read or written now; the request itself was valid."""


class PoolFull(PoolError):
    """The limit of groups that wait to be trained is reached."""


class TrainError(PenstockError):
    """Training cannot continue."""


class boundary:
    """Turn an exception of foreign code into `error`; `what` says what was being done. A PenstockError passes unchanged.

    >>> with boundary(GraderError, "grader 'exact' on rollout r1"):
    ...     1 / 0
    Traceback (most recent call last):
    penstock.errors.GraderError: grader 'exact' on rollout r1: ZeroDivisionError: division by zero
    """

    __slots__ = ("_error", "_what")

    def __init__(self, error: type[PenstockError], what: str) -> None:
        self._error = error
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, PenstockError):
            raise self._error(f"{self._what}: {type(cause).__name__}: {str(cause) or 'no message'}") from cause


class Problems:
    """Collects mistakes instead of stopping at the first one.

    >>> problems = Problems()
    >>> with problems.noting("gateway.port"):
    ...     raise ConfigError("gateway.port = 80 cannot be used; set another")
    >>> problems.refuse("train.toml")
    Traceback (most recent call last):
    penstock.errors.ConfigError: gateway.port = 80 cannot be used; set another
    """

    def __init__(self) -> None:
        self.errors: list[tuple[str, ConfigError]] = []

    @contextmanager
    def noting(self, key: str, *, table: bool = False) -> Generator[None]:
        """Collect a ConfigError that is raised inside, under `key`; other errors pass.

        With `table`, the error's own keys are those of a table called `key`.
        """
        try:
            yield
        except ConfigError as error:
            if table:
                error.issues = tuple(
                    Issue(f"{key}.{issue.key}", f"[{key}] {issue.message}", issue.correction) for issue in error.issues
                )
            self.errors.append((key, error))

    def refuse(self, where: str) -> None:
        """Raise what was collected: a single error unchanged, several as one ConfigError with an issue for each."""
        if len(self.errors) == 1:
            raise self.errors[0][1]
        if self.errors:
            raise combine_issues(
                where, [issue for key, error in self.errors for issue in error.issues or (Issue(key, str(error)),)]
            )


def combine_issues(where: str, issues: Sequence[Issue], kind: type[ConfigError] = ConfigError) -> ConfigError:
    """Build one error: a single issue on one line, several on lines below one that counts them."""
    if len(issues) == 1:
        return kind(f"{where}: {issues[0].line}", issues)
    return kind("\n  ".join([f"{where}: {len(issues)} problems", *(issue.line for issue in issues)]), issues)


_MAX_MESSAGE_CHARS = 500


def one_line(cause: BaseException) -> str:
    """Returns an error as one short line of valid UTF-8, for any store and terminal."""
    if isinstance(cause, PenstockError):
        text = str(cause)
    else:
        try:
            text = f"{type(cause).__name__}: {str(cause) or 'no message'}"
        except Exception:  # an author's error may fail even at this
            text = f"{type(cause).__name__}: its message cannot be shown"
    text = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}…"
