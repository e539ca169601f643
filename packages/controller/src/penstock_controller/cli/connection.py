"""The controller that commands talk to: connecting, progress of transfers, pages of lists."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.output import stage_progress, warn

if TYPE_CHECKING:
    from penstock_controller.client import ControllerClient, ProgressCallback

PANEL = "Commands for runs on a controller"
"""Title in the help of commands that need a controller."""


def connect() -> "ControllerClient":
    """Returns the controller that the environment names, else the user's own; starts it if it is not running."""
    from penstock_controller.home import default_home
    from penstock_controller.local import find_controller, named_controller, read_address
    from penstock_controller.submit import repository_name

    git = repository_name(Path())
    if named_controller(git) is None and read_address(default_home()) is None:
        warn("starting a controller in the background; see: penstock controller status")
    return find_controller(git)


def connect_if_running() -> "ControllerClient | None":
    """Returns the controller that the environment names, or the user's own if it is running, or None. Starts nothing."""
    from penstock_controller.client import ControllerClient
    from penstock_controller.home import default_home
    from penstock_controller.local import find_running, named_controller
    from penstock_controller.submit import repository_name

    git, home = repository_name(Path()), default_home()
    if (named := named_controller(git)) is not None:
        return named
    address = find_running(home)
    return ControllerClient(address.url, home.token(), git) if address else None


@contextmanager
def transfer_progress() -> "Generator[ProgressCallback]":
    """Shows the progress of a transfer on stderr."""
    with stage_progress() as progress:

        def update(stage: str, done: int, total: int | None) -> None:
            progress(stage, done, total)

        yield update


def fetch_page(fetch: Callable[[int, int], dict[str, Any]], key: str, limit: int, *, everything: bool) -> dict[str, Any]:
    """Returns the first `limit` rows of a list, or all of it as one page."""
    from penstock_controller.client import PAGE_ROWS, all_rows

    if not everything:
        return fetch(limit, 0)
    rows = list(all_rows(lambda offset: fetch(PAGE_ROWS, offset), key))
    return {key: rows, "total_count": len(rows), "has_more": False, "next_offset": None}
