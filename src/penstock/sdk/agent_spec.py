"""The author's file in another interpreter: what that one needs to load the same agent."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from penstock.config import AgentSection
from penstock.sdk.discovery import Agent, open_agent


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent as another interpreter can make it."""

    agent: dict[str, Any]
    """`[agent]` of the TOML."""
    workflow: dict[str, Any]
    grader: dict[str, Any]
    path: list[str]
    """Where modules are looked for."""

    @classmethod
    def of(cls, agent: Agent) -> Self:
        """Of an agent that was loaded here."""
        workflow, grader = agent.tables
        return cls.to_load(agent.source, workflow, grader)

    @classmethod
    def to_load(cls, source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Self:
        """Of an agent that has not been loaded yet."""
        agent = source.model_dump(mode="json")
        return cls(agent=agent, workflow=dict(workflow), grader=dict(grader), path=list(sys.path))

    @classmethod
    def read(cls, text: bytes) -> Self:
        return cls(**json.loads(text))

    def write(self) -> bytes:
        """As JSON; a date of the TOML becomes its ISO form, which a config class reads too."""
        return json.dumps(asdict(self), default=str).encode()

    def load(self) -> Agent:
        """The agent, loaded here; see `open_agent`."""
        sys.path[:] = self.path
        return open_agent(AgentSection.model_validate(self.agent), self.workflow, self.grader)
