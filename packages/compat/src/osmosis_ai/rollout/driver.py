"""The interface of a driver that runs rollouts for an evaluation."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from osmosis_ai.rollout.types import MessageDict, RolloutStatus
from penstock.sdk.samples import RolloutSample

__all__ = ["RolloutDriver", "RolloutOutcome"]


@dataclass
class RolloutOutcome:
    status: RolloutStatus
    samples: dict[str, RolloutSample] = field(default_factory=dict[str, RolloutSample])
    error: str | None = None
    duration_ms: float = 0.0
    tokens: int = 0
    systemic_error: str | None = None
    """An error that would fail every other rollout too."""


class RolloutDriver(ABC):
    """Runs one rollout and grades it."""

    @property
    def max_concurrency(self) -> int:
        """The number of rollouts that may run at once; 0 means no limit."""
        return 0

    @abstractmethod
    async def run(self, messages: list[MessageDict], label: str | None = None, rollout_id: str = "") -> RolloutOutcome:
        """Runs one rollout to its end. A failure is returned as an outcome, not raised."""
