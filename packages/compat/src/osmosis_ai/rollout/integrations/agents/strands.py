"""The Strands Agents integration under Osmosis names."""

from penstock.integrations import strands

__all__ = ["OsmosisRolloutModel", "OsmosisStrandsAgent"]


class OsmosisRolloutModel(strands.RolloutModel):
    """A placeholder for the policy; takes `params`."""


class OsmosisStrandsAgent(strands.RolloutAgent):
    """A `strands.Agent` that is recorded under its name."""
