"""The command line: `penstock train`, `report`, `verify`, `gateway`, `run`, `pool`, `models`, `doctor`."""

from penstock.cli.app import main

__all__ = ["main"]
