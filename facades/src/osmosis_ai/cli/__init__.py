"""The `osmosis` command line for Penstock's controller."""

from osmosis_ai.cli.app import main

__all__ = ["main"]
