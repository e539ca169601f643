"""A command of the user's in a process group of its own, which is ended as a whole; the terminal is lent to it meanwhile."""

import asyncio
import os
import signal
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from penstock.system.process_group import end_group, signal_group

STDIN = 0
GRACE_S = 5.0
"""For a group that was asked to end; then it is killed."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    """Its exit code; 128 and the signal's number where one ended it."""
    late: bool = False
    """Whether it was ended because its time was up."""


async def run_command(
    command: Sequence[str], environment: Mapping[str, str], stop: asyncio.Event, timeout_s: float | None = None
) -> Ended:
    """Run it to its end; `stop`, or the time that it has, ends the whole group. Where `stop` came first, it is not begun."""
    if stop.is_set():
        return Ended(128 + signal.SIGINT)
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment), process_group=0)
    late = False
    try:
        with _terminal(process.pid):
            over, stopped = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.wait())
            try:
                ended, _ = await asyncio.wait({over, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                late = not ended
                if not over.done():
                    await end_group(process, GRACE_S)
            finally:
                stopped.cancel()
    finally:
        if process.returncode is None or stop.is_set():
            signal_group(process, signal.SIGKILL)
    code = await process.wait()
    return Ended(code if code >= 0 else 128 - code, late)


@contextmanager
def _terminal(group: int) -> Generator[None]:
    """Let the group read from the terminal and get its Ctrl-C, where we could; it is ours again afterwards."""
    ours = os.getpgrp()
    if not _is_foreground(ours):
        yield
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # who asks for it back is in the background
    try:
        with suppress(OSError):
            os.tcsetpgrp(STDIN, group)
            os.killpg(group, signal.SIGCONT)  # it may have tried to read before
        yield
    finally:
        with suppress(OSError):
            os.tcsetpgrp(STDIN, ours)
        signal.signal(signal.SIGTTOU, before)


def _is_foreground(group: int) -> bool:
    try:
        return os.tcgetpgrp(STDIN) == group
    except OSError:  # no terminal
        return False
