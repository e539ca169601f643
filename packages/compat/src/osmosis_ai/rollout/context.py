"""Penstock's contexts with Osmosis field names."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from penstock.sdk import routing
from penstock.sdk.context import AgentWorkflowContext, C, GraderContext
from penstock.sdk.samples import RolloutSample

__all__ = [
    "AgentWorkflowContext",
    "GraderContext",
    "HarborAgentWorkflowContext",
    "RolloutContext",
    "SampleSource",
    "get_rollout_context",
]

URL_VARIABLE = "OSMOSIS_CHAT_COMPLETIONS_URL"
KEY_VARIABLE = "OSMOSIS_API_KEY"
ID_VARIABLE = "OSMOSIS_ROLLOUT_ID"


class SampleSource(ABC):
    """An agent or session that returns its conversation as a sample."""

    @abstractmethod
    async def get_sample(self, name: str) -> RolloutSample:
        """Returns the conversation so far. `name` is the name under which the source is registered."""


class RolloutContext(routing.RolloutContext):
    """Penstock's context. Empty arguments are read from the environment."""

    def __init__(
        self,
        chat_completions_url: str = "",
        api_key: str | None = None,
        rollout_id: str = "",
        sample_sources: dict[str, routing.SampleSource] | None = None,
    ) -> None:
        super().__init__(
            base_url=chat_completions_url or os.environ.get(URL_VARIABLE, ""),
            api_key=api_key or os.environ.get(KEY_VARIABLE, ""),
            rollout_id=rollout_id or os.environ.get(ID_VARIABLE, ""),
            sample_sources={} if sample_sources is None else sample_sources,
        )

    @property
    def api_key(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The policy's key; None without one."""
        return self.__dict__["api_key"] or None

    @api_key.setter
    def api_key(self, key: str | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["api_key"] = key or ""

    @property
    def chat_completions_url(self) -> str:
        """The policy's base URL, to which clients append `/chat/completions`."""
        return self.base_url


def get_rollout_context() -> RolloutContext | None:
    """Returns the context of the running rollout. A context made by Penstock is wrapped and shares its state."""
    found = routing.get_rollout_context()
    if found is None or isinstance(found, RolloutContext):
        return found
    renamed = object.__new__(RolloutContext)
    renamed.__dict__ = found.__dict__
    return renamed


@dataclass
class HarborAgentWorkflowContext(AgentWorkflowContext[C]):
    """The context of workflows that act in an environment. Penstock provides none."""

    environment: Any = None
