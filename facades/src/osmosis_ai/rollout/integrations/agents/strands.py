"""Strands Agents."""

from penstock.integrations import strands

__all__ = ["OsmosisRolloutModel", "OsmosisStrandsAgent"]


class OsmosisRolloutModel(strands.RolloutModel):
    """Stands for the policy; takes `params`."""


class OsmosisStrandsAgent(strands.RolloutAgent):
    """A `strands.Agent` that is recorded as its name."""
