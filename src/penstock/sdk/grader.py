"""Grader: what an author subclasses to reward a rollout."""

from abc import ABC, abstractmethod
from typing import Any

from pydantic import Field

from penstock.sdk.context import GraderContext
from penstock.sdk.workflow import BaseConfig, ConcurrencyConfig


class GraderConfig(BaseConfig):
    """Configuration of a grader."""

    concurrency: ConcurrencyConfig = Field(default_factory=ConcurrencyConfig)


class Grader(ABC):
    """Judges one rollout after its agent has finished."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    async def grade(self, ctx: GraderContext) -> Any:
        """Call `ctx.set_sample_reward(id, reward)` for each transcript, or `ctx.set_reward(reward)` for the whole rollout."""
