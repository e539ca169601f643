"""Processes whose parent has died: on Linux they can be handed to us instead of to init, wherever they hid from their group."""

import ctypes
import os
import signal
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on, orphans among our descendants become our children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Of our own, adopted ones included; none where the system does not tell."""
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()


def sweep(known: Collection[int]) -> bool:
    """Kill every child that is not `known`, and bury those that have died; whether there were any."""
    strangers = children().difference(known)
    for pid in strangers:
        with suppress(ProcessLookupError, ChildProcessError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
    return bool(strangers)
