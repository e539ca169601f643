"""What drives a rollout for an evaluation, as a type to write one's own against."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from osmosis_ai.rollout.types import MessageDict, RolloutStatus
from penstock.sdk.samples import RolloutSample

__all__ = ["RolloutDriver", "RolloutOutcome"]


@dataclass
class RolloutOutcome:
    """What came of one rollout."""

    status: RolloutStatus
    samples: dict[str, RolloutSample] = field(default_factory=dict[str, RolloutSample])
    error: str | None = None
    duration_ms: float = 0.0
    tokens: int = 0
    systemic_error: str | None = None
    """What would fail every other rollout as well."""


class RolloutDriver(ABC):
    """Runs one rollout and grades it."""

    @property
    def max_concurrency(self) -> int:
        """How many may run at once; 0 is no limit."""
        return 0

    @abstractmethod
    async def run(self, messages: list[MessageDict], label: str | None = None, rollout_id: str = "") -> RolloutOutcome:
        """One rollout to its end; a failure is an outcome, not an error."""
