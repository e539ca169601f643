"""The Osmosis rollout API over Penstock: names and conversions only."""

__version__ = "0.1.0"
