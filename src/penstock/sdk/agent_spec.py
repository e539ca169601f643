"""AgentSpec: what another interpreter needs to load the same agent."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from penstock.config import AgentSection
from penstock.sdk.discovery import Agent, open_agent


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    agent: dict[str, Any]
    """`[agent]` of the TOML."""
    workflow: dict[str, Any]
    grader: dict[str, Any]
    path: list[str]
    """`sys.path`."""

    @classmethod
    def of(cls, agent: Agent) -> Self:
        workflow, grader = agent.tables
        return cls.from_config(agent.source, workflow, grader)

    @classmethod
    def from_config(cls, source: AgentSection, workflow: Mapping[str, Any], grader: Mapping[str, Any]) -> Self:
        """For an agent that is not loaded here."""
        agent = source.model_dump(mode="json")
        return cls(agent=agent, workflow=dict(workflow), grader=dict(grader), path=list(sys.path))

    @classmethod
    def read(cls, text: bytes) -> Self:
        return cls(**json.loads(text))

    def write(self) -> bytes:
        """Returns JSON; a date of the TOML becomes its ISO form, which config classes accept."""
        return json.dumps(asdict(self), default=str).encode()

    def load(self) -> Agent:
        """Loads the agent in this interpreter; see `open_agent`."""
        sys.path[:] = self.path
        return open_agent(AgentSection.model_validate(self.agent), self.workflow, self.grader)
