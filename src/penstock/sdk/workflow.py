"""AgentWorkflow and Grader, the classes that an author subclasses, and their configs."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from penstock.sdk.context import AgentWorkflowContext, GraderContext


class ConcurrencyConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_concurrent: int | None = Field(default=None, ge=1)
    """None is unlimited."""


class BaseConfig(BaseModel):
    """Configuration of a workflow or grader: authors add their own fields, `[workflow]` and `[grader]` in the TOML set them."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, arbitrary_types_allowed=True, populate_by_name=True)

    name: str
    description: str | None = None


class AgentWorkflowConfig(BaseConfig):
    """Configuration of a workflow."""

    concurrency: ConcurrencyConfig = Field(default_factory=ConcurrencyConfig)


TConfig = TypeVar("TConfig", bound=BaseConfig)


class AgentWorkflow(ABC, Generic[TConfig]):
    """An agent. Each rollout gets its own instance; every model call goes through the rollout's context."""

    def __init__(self, config: TConfig | None = None) -> None:
        self.config = config

    @abstractmethod
    async def run(self, ctx: AgentWorkflowContext[TConfig]) -> Any:
        """Work on `ctx.prompt`. The gateway records every call; if it returns messages, the grader sees those."""


class GraderConfig(BaseConfig):
    """Configuration of a grader."""

    concurrency: ConcurrencyConfig = Field(default_factory=ConcurrencyConfig)


class Grader(ABC):
    """Grades one rollout after its agent has finished."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    async def grade(self, ctx: GraderContext) -> Any:
        """Call `ctx.set_sample_reward(id, reward)` for each transcript, or `ctx.set_reward(reward)` for the whole rollout."""
