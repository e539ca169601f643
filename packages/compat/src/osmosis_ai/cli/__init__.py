"""The `osmosis` command line for Penstock's controller."""

from osmosis_ai.__main__ import main

__all__ = ["main"]
