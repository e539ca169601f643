"""What a workflow and a grader are given: the task's side for one, the label and the transcripts for the other."""

import contextvars
import math
import reprlib
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from penstock.errors import ConfigError, GraderError
from penstock.records import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI

C = TypeVar("C")

_active: contextvars.ContextVar["RolloutContext | None"] = contextvars.ContextVar("penstock_rollout", default=None)


@dataclass(kw_only=True)
class RolloutContext:
    """Where the model calls of the running rollout go. A context manager; contexts nest and are restored on leaving."""

    base_url: str
    """Of the gateway's OpenAI routes, ending in `/v1`."""
    api_key: str
    """The rollout's model token: opens model routes, nothing else."""
    rollout_id: str = ""
    client: Any = None
    """An `AsyncOpenAI` whose connections `openai()` may share; None opens new ones."""
    _tokens: list[contextvars.Token["RolloutContext | None"]] = field(default_factory=list[Any], repr=False)

    def __enter__(self) -> Self:
        self._tokens.append(_active.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _active.reset(self._tokens.pop())

    def headers(self, transcript: str) -> dict[str, str]:
        """Headers that say which transcript of which rollout a call belongs to."""
        return {"x-rollout-id": self.rollout_id, "x-sample-id": transcript}

    def openai(self, transcript: str = "main") -> "AsyncOpenAI":
        """An `openai` client whose calls are recorded in this rollout, as `transcript`."""
        if self.client is not None:
            return self.client.with_options(api_key=self.api_key, base_url=self.base_url, default_headers=self.headers(transcript))
        try:
            from openai import AsyncOpenAI
        except ImportError as cause:
            raise ConfigError("ctx.openai() needs the `openai` package: pip install openai") from cause
        return AsyncOpenAI(api_key=self.api_key, base_url=self.base_url, default_headers=self.headers(transcript))


def get_rollout_context() -> RolloutContext | None:
    """The context of the rollout that this code runs in; None outside of one."""
    return _active.get()


@dataclass(kw_only=True)
class AgentWorkflowContext(Generic[C]):
    """What a workflow sees of its task: never the label."""

    prompt: list[Message]
    config: C | None = None
    metadata: dict[str, Any] | None = None
    artifacts_dir: Path | None = None

    def openai(self, transcript: str = "main") -> "AsyncOpenAI":
        """An `openai` client for the running rollout; the model's name may be anything."""
        return _running("ctx.openai()").openai(transcript)

    @property
    def base_url(self) -> str:
        """Where any other OpenAI-style client must send its calls, ending in `/v1`."""
        return _running("ctx.base_url").base_url

    @property
    def api_key(self) -> str:
        """The key such a client must use: it is this rollout's own and opens model routes only."""
        return _running("ctx.api_key").api_key


def _running(what: str) -> RolloutContext:
    context = get_rollout_context()
    if context is None:
        raise ConfigError(f"{what} works inside a rollout only; run the workflow with `penstock train`")
    return context


@dataclass(kw_only=True)
class RolloutSample:
    """One transcript of a rollout, as its grader sees it."""

    id: str
    messages: list[Message]
    """The last call's messages and its reply."""
    reward: float | None = None


@dataclass(kw_only=True)
class GraderContext:
    """What a grader sees, and where it puts its verdict."""

    label: str | None = None
    samples: dict[str, RolloutSample] = field(default_factory=dict[str, RolloutSample])
    metadata: dict[str, Any] | None = None
    artifacts_dir: Path | None = None
    reward: float | None = None
    """Of the whole rollout; None where only transcripts were graded."""

    def __post_init__(self) -> None:
        self.metadata = deepcopy(self.metadata)

    def get_samples(self) -> dict[str, RolloutSample]:
        """The transcripts by id."""
        return self.samples

    @property
    def sample(self) -> RolloutSample:
        """The only transcript."""
        if len(self.samples) != 1:
            raise GraderError(f"ctx.sample needs exactly one transcript, this rollout has {sorted(self.samples)}; use ctx.samples")
        return next(iter(self.samples.values()))

    def set_sample_reward(self, sample_id: str, reward: float) -> None:
        """Reward one transcript."""
        if sample_id not in self.samples:
            raise ValueError(f"unknown sample {sample_id!r}; this rollout has {sorted(self.samples)}")
        self.samples[sample_id].reward = finite_reward(reward)

    def set_reward(self, reward: float) -> None:
        """Reward the whole rollout."""
        self.reward = finite_reward(reward)


def finite_reward(reward: Any) -> float:
    """`reward` as a float; GraderError names a value that cannot be trained on."""
    refused = GraderError(f"reward {reprlib.repr(reward)} is not a finite number; give a finite float")
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise refused
    try:
        number = float(reward)
    except OverflowError as cause:
        raise refused from cause
    if not math.isfinite(number):
        raise refused
    return number
