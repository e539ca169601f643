"""The `penstock` command: one module per command, gathered in `app.py`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the command line on first use: its plug-ins import modules of this package."""
    if name != "main":
        raise AttributeError(f"module 'penstock.cli' has no attribute {name!r}")
    from penstock.cli.app import main

    return main
