"""What a tracker receives of a run, and the class that each derives from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import orjson

from penstock.config import TrackSection
from penstock.errors import ConfigError
from penstock.records import Message
from penstock.system.packages import install_command

ArtifactKind = Literal["config", "summary", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    project: str
    name: str
    folder: Path
    """The run's folder; a tracker that writes files writes them below it."""
    config: Mapping[str, Any]
    """The run's settings, as JSON."""
    first_step: int
    """The first that will be logged. A resumed run repeats steps that a kill undid."""
    id: str = ""
    """What `start` returned when an earlier process of this run called it; empty for a new run."""
    offline: bool = False
    """Nothing may go over the network."""


class TrackerStart(NamedTuple):
    id: str
    """Lets a later process continue the same run."""
    place: str
    """Where a person finds it: an address, a file or a command."""


class TracedCall(NamedTuple):
    """One model call of a rollout."""

    transcript: str
    created: float
    """Seconds since 1970."""
    seconds: float
    tokens: int
    finish: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTrace:
    """A rollout as people read it. Long texts are cut."""

    rollout_id: str
    group_id: str
    task_id: str
    end: str
    why: str
    """The message that it ended with."""
    reward: float | None
    grades: Mapping[str, float]
    """The grades of the whole rollout, by source."""
    version: int | None
    """The oldest policy version that sampled it."""
    transcripts: Mapping[str, Sequence[Message]]
    calls: Sequence[TracedCall]

    @property
    def labels(self) -> dict[str, Any]:
        """Everything but the conversation."""
        return {
            "rollout": self.rollout_id,
            "group": self.group_id,
            "task": self.task_id,
            "end": self.end,
            **({"why": self.why} if self.why else {}),
            "reward": self.reward,
            "grades": dict(self.grades),
            "policy_version": self.version,
        }

    @property
    def messages(self) -> list[Message]:
        """All transcripts, one after the other."""
        return [message for messages in self.transcripts.values() for message in messages]

    def text(self) -> str:
        """The conversation as plain text."""
        lines = list[str]()
        for name, messages in self.transcripts.items():
            lines += [f"=== {name}"] if len(self.transcripts) > 1 else []
            lines += [_message_text(message) for message in messages]
        return "\n\n".join(lines)


def _message_text(message: Message) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else orjson.dumps(content).decode()
    calls = [orjson.dumps(call.get("function", call)).decode() for call in message.get("tool_calls") or ()]
    return "\n".join([f"[{message.get('role', '?')}]", *([text] if text else []), *calls])


def load_package(name: str) -> Any:
    """Import a tracker's package; it is not installed where the code is checked, so nothing is known of its types."""
    return import_module(name)


class Tracker:
    """A run as one tracker keeps it. Its methods are called in one thread of their own: `start` first, `finish` last.

    An error that one of them raises is shown and counted, and the run continues.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    """What must be installed."""
    extra: ClassVar[str] = ""
    """The extra of penstock that installs it."""

    @classmethod
    def check(cls, section: TrackSection) -> None:
        """Raise ConfigError if it cannot be used. Called before a run begins."""
        for module in cls.modules:
            if find_spec(module) is None:
                remedy = f"; run: {install_command(cls.extra)}" if cls.extra else "; install it"
                raise ConfigError(f"track.to: the package {module} is not installed{remedy}")

    def start(self, run: TrackedRun) -> TrackerStart:
        raise NotImplementedError

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers, such as `train/reward`, of a step."""
        raise NotImplementedError

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        """Record rollouts of a step, where people can read them."""

    def artifact(self, path: Path, kind: ArtifactKind) -> None:
        """Keep a file or folder of the run."""

    def finish(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Write what is left and close."""
