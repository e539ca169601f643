"""The Claw-R1 Agent Flow API over Penstock: names and conversions only."""

__version__ = "0.1.0"

__all__ = ["__version__"]
