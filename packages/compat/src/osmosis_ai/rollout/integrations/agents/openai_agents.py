"""The OpenAI Agents SDK integration under Osmosis names."""

from agents import TContext

from penstock.integrations.openai_agents import BoundModel as OsmosisLitellmModel
from penstock.integrations.openai_agents import RolloutAgent, RolloutModel, RolloutSession

__all__ = ["OsmosisAgent", "OsmosisLitellmModel", "OsmosisMemorySession", "OsmosisRolloutModel"]


class OsmosisRolloutModel(RolloutModel):
    """A placeholder for the policy."""

    agent_name = "OsmosisAgent"
    session_name = "OsmosisMemorySession"


class OsmosisAgent(RolloutAgent[TContext]):
    """An `Agent` whose placeholder is replaced by the policy of the running rollout."""


class OsmosisMemorySession(RolloutSession):
    """One conversation of a rollout; its name is the sample's id."""
