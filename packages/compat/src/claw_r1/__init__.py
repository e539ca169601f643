"""The Claw-R1 Agent Flow API on Penstock. It contains names and conversions only."""

__version__ = "0.1.0"

__all__ = ["__version__"]
