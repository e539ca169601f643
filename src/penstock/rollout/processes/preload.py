"""Imports in the fork server what each job's first model call would otherwise have to import itself."""

import importlib
import sys
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from penstock.sdk.routing import RolloutContext

ROUTES = {"openai": ("chat.completions", "responses"), "anthropic": ("messages",)}
"""By package: attributes of its client whose modules are loaded on first access."""
ANYIO_BACKEND = "anyio._backends._asyncio"
"""Loaded by both packages' connections when they are first used in an event loop."""


def preload_clients(home: Path) -> None:
    """Makes a client of each package that the author's files in `home` mention or have imported; no call is made."""
    modules = list(sys.modules.values())
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None)) and file.endswith(".py")}
    text = "".join(file.read_text(errors="replace") for file in files if file.parent == home)
    context = RolloutContext(base_url="http://127.0.0.1/v1", api_key="none")
    for package, parts in ROUTES.items():
        if package in text or package in sys.modules:
            with suppress(Exception):  # if this fails, the author's own call will fail and say so
                attrgetter(*parts)(getattr(context, package)())
                importlib.import_module(ANYIO_BACKEND)
