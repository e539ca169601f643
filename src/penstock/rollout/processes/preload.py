"""What the first model call of a process would have to import, imported once in the zygote instead of in every job."""

import importlib
import sys
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from penstock.sdk.routing import RolloutContext

ROUTES = {"openai": ("chat.completions", "responses"), "anthropic": ("messages",)}
"""By package: parts of its client that it loads only when they are asked for."""
BACKEND = "anyio._backends._asyncio"
"""What both packages' connections load in an event loop."""


def warm(home: Path) -> None:
    """Make a client of each package that the author's files in `home` name, or that they have imported; no call is made."""
    modules = list(sys.modules.values())
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None)) and file.endswith(".py")}
    text = "".join(file.read_text(errors="replace") for file in files if file.parent == home)
    context = RolloutContext(base_url="http://127.0.0.1/v1", api_key="none")
    for package, parts in ROUTES.items():
        if package in text or package in sys.modules:
            with suppress(Exception):  # where this fails, the author's own call will say so
                attrgetter(*parts)(getattr(context, package)())
                importlib.import_module(BACKEND)
