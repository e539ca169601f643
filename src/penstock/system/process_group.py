"""A program with all that it starts: one process group, ended as a whole, and how it ended in words."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress


async def end_group(process: Process, grace_s: float) -> None:
    """Ask the group of `process` to end, and kill what is left of it once its leader has ended or `grace_s` has passed.

    The leader is dead when this returns. Cancelled meanwhile, it kills at once.
    """
    try:
        signal_group(process, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    finally:
        signal_group(process, signal.SIGKILL)
    await process.wait()


def signal_group(process: Process, number: int) -> None:
    """Send a signal to every process of the group that `process` leads; nothing where none is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def how_ended(code: int) -> str:
    """An exit code as `subprocess` gives it, in words that follow "its process".

    >>> how_ended(-11), how_ended(3)
    ('was killed by SIGSEGV', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have numbers only
        name = f"signal {-code}"
    return f"was killed by {name}" + (", by the user or for want of memory" if -code == signal.SIGKILL else "")
