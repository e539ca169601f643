"""Configs, samples, statuses and the message bodies of the rollout server's protocol."""

from copy import deepcopy
from dataclasses import field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from penstock.sdk import samples
from penstock.sdk.workflow import AgentWorkflowConfig, BaseConfig, ConcurrencyConfig, GraderConfig
from penstock_compat.lazy import lazy_attributes
from penstock_compat.rollout_server.protocol import (
    GraderCompleteRequest,
    GraderStatus,
    RolloutCompleteRequest,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutStatus,
)

if TYPE_CHECKING:
    from penstock_compat.rollout_server.backend import ExecutionRequest, ExecutionResult

__all__ = [
    "AgentWorkflowConfig",
    "AgentWorkflowOutput",
    "BaseConfig",
    "ConcurrencyConfig",
    "ExecutionRequest",
    "ExecutionResult",
    "GraderCompleteRequest",
    "GraderConfig",
    "GraderInitRequest",
    "GraderInitResponse",
    "GraderStatus",
    "MessageDict",
    "MultiTurnMode",
    "RolloutCompleteRequest",
    "RolloutErrorCategory",
    "RolloutInitRequest",
    "RolloutInitResponse",
    "RolloutSample",
    "RolloutStatus",
]

__getattr__ = lazy_attributes(
    __name__, dict.fromkeys(("ExecutionRequest", "ExecutionResult"), "penstock_compat.rollout_server.backend")
)

MessageDict = dict[str, Any]

_AS_MESSAGES: list[MessageDict] = []
"""Marks `trajectory_messages` as not given."""


class MultiTurnMode(StrEnum):
    """How several turns become samples. Unused, in Osmosis too."""

    MULTI_SAMPLE = "multi_sample"
    SINGLE_SAMPLE = "single_sample"


@dataclass(kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class RolloutSample(samples.RolloutSample):
    """Penstock's sample with validation and the methods of a pydantic model."""

    trajectory_messages: list[MessageDict] | None = field(default_factory=lambda: _AS_MESSAGES)
    """Defaults to a copy of the messages. Penstock ignores it and saves what its gateway recorded."""

    def __post_init__(self) -> None:
        if self.trajectory_messages is _AS_MESSAGES:
            self.trajectory_messages = deepcopy(self.messages)

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        return TypeAdapter(cls).validate_python(obj)

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Self:
        return replace(deepcopy(self) if deep else self, **update or {})


class AgentWorkflowOutput(BaseModel):
    """What `run` may return; the grader finds the messages as `sample.reported_messages`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    messages: list[MessageDict] | None = None
    metrics: dict[str, float] = Field(default_factory=dict[str, float])
    info: dict[str, Any] = Field(default_factory=dict[str, Any])


class GraderInitRequest(BaseModel):
    """Asks a grader elsewhere to grade samples; nothing sends it, in Osmosis either."""

    model_config = ConfigDict(extra="ignore")

    rollout_id: str
    samples: dict[str, RolloutSample]
    completion_callback_url: str
    extra_fields: dict[str, Any] | None = None
    controller_api_key: str | None = None


class GraderInitResponse(BaseModel):
    pass
