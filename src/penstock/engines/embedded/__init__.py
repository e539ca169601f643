"""The embedded engine: torch in our process, weights shared with the trainer."""

from penstock.engines.embedded.engine import open_engine

__all__ = ["open_engine"]
