"""The `osmosis` command line over Penstock's controller."""

from osmosis_ai.cli.app import main

__all__ = ["main"]
