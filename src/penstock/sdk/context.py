"""The contexts of a workflow (the task without its label) and of a grader (the label and the transcripts)."""

import math
import reprlib
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from penstock.errors import GraderError
from penstock.records import MAX_REWARD, Message
from penstock.sdk.clients import NO_KEY
from penstock.sdk.routing import MAIN, running_rollout
from penstock.sdk.samples import RolloutSample, fast_copy

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

C = TypeVar("C")
MAX_NAME, MAX_COMPONENTS = 64, 32
"""Characters in the name of a part of the reward, and such parts in a rollout: each is a curve."""


class ArtifactsDir:
    """A descriptor for a path whose folder is made when it is read, as most rollouts never do. None if it cannot be made."""

    def __get__(self, owner: Any, kind: Any = None) -> Path | None:
        if owner is None or (path := cast("Path | None", vars(owner)["_artifacts_dir"])) is None:
            return None
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        vars(owner)["_made"] = path
        return path

    def __set__(self, owner: Any, path: Path | None) -> None:
        vars(owner)["_artifacts_dir"] = path


def remove_empty_artifacts_dir(context: Any) -> None:
    """Removes the folder that was made for a context if it is empty."""
    made = cast("Path | None", vars(context).get("_made"))
    if made is not None:
        with suppress(OSError):
            made.rmdir()


@dataclass
class AgentWorkflowContext(Generic[C]):
    """A workflow's view of its task: never the label."""

    prompt: list[Message]
    config: C | None = None
    _: KW_ONLY
    metadata: dict[str, Any] | None = None
    artifacts_dir: ArtifactsDir = ArtifactsDir()  # a descriptor: reads and writes are `Path | None`

    def openai(self, transcript: str = MAIN) -> "AsyncOpenAI":
        """Returns an `openai` client for the running rollout; the model's name may be anything, or a policy's."""
        return running_rollout("ctx.openai()").openai(transcript)

    def anthropic(self, transcript: str = MAIN) -> "AsyncAnthropic":
        """Returns an `anthropic` client for the running rollout; the model's name may be anything, or a policy's."""
        return running_rollout("ctx.anthropic()").anthropic(transcript)

    @property
    def base_url(self) -> str:
        """The base URL for any other OpenAI-style client, ending in `/v1`."""
        return running_rollout("ctx.base_url").base_url

    @property
    def api_key(self) -> str:
        """The key for such a client: it is this rollout's own and opens model routes only."""
        return running_rollout("ctx.api_key").api_key or NO_KEY


@dataclass
class GraderContext:
    """A grader's view of a rollout, and where it sets rewards."""

    label: str | None = None
    samples: dict[str, RolloutSample] = field(default_factory=dict[str, RolloutSample])
    _: KW_ONLY
    metadata: dict[str, Any] | None = None
    artifacts_dir: ArtifactsDir = ArtifactsDir()  # a descriptor: reads and writes are `Path | None`
    project_path: Path | None = None
    """The folder of the file that holds the grader."""
    reward: float | None = None
    """The reward of the whole rollout; None if only its transcripts or steps were graded."""
    step_rewards: dict[int, float] = field(default_factory=dict[int, float])
    """By the index of the call."""
    components: dict[str, float] = field(default_factory=dict[str, float])
    """Named parts, which are added to the reward."""

    def __post_init__(self) -> None:
        self.metadata = fast_copy(self.metadata)

    def get_samples(self) -> dict[str, RolloutSample]:
        return self.samples

    @property
    def sample(self) -> RolloutSample:
        if len(self.samples) != 1:
            raise GraderError(f"ctx.sample needs exactly one transcript, this rollout has {sorted(self.samples)}; use ctx.samples")
        return next(iter(self.samples.values()))

    def set_sample_reward(self, sample_id: str, reward: float) -> None:
        if sample_id not in self.samples:
            raise ValueError(f"unknown sample {sample_id!r}; this rollout has {sorted(self.samples)}")
        self.samples[sample_id].reward = finite_reward(reward)

    def set_reward(self, reward: float) -> None:
        """Rewards the whole rollout."""
        self.reward = finite_reward(reward)

    def add_reward(self, name: str, reward: float) -> None:
        """Adds a named part to the reward of the whole rollout, and to what the same name has. Its mean is shown as a curve."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"ctx.add_reward: {reprlib.repr(name)} is no name; give 1 to {MAX_NAME} printable characters")
        if name not in self.components and len(self.components) == MAX_COMPONENTS:
            raise ValueError(f"ctx.add_reward: {name!r} is one name too many (at most {MAX_COMPONENTS}); name kinds of reward")
        self.components[name] = finite_reward(self.components.get(name, 0.0) + finite_reward(reward))

    def set_step_reward(self, step: int, reward: float) -> None:
        """Rewards one call, by its index in `samples[…].steps`. If nothing else is rewarded, the rollout gets the sum."""
        known = sorted(index for sample in self.samples.values() for index in sample.steps)
        if step not in known:
            raise ValueError(f"unknown step {step!r}; this rollout has {known}")
        self.step_rewards[step] = finite_reward(reward)


def finite_reward(reward: Any) -> float:
    """Returns `reward` as a float; GraderError if it is no finite number, or beyond MAX_REWARD."""
    error = GraderError(f"reward {reprlib.repr(reward)} is not a finite number; give a finite float")
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise error
    try:
        number = float(reward)
    except OverflowError as cause:
        raise error from cause
    if not math.isfinite(number):
        raise error
    if abs(number) > MAX_REWARD:
        raise GraderError(f"reward {number:g} is not between {-MAX_REWARD:g} and {MAX_REWARD:g}; scale the rewards down")
    return number
