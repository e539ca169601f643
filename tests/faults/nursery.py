"""Processes that are made to be killed. One parent that has imported everything forks them, so that each begins in milliseconds."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

FULL = os.environ.get("PENSTOCK_FAULTS") == "full"
"""Whether to kill as often as promised, which takes minutes, or a tenth of that."""


def times(full: int) -> int:
    """That many, or a tenth."""
    return full if FULL else full // 10


class Nursery:
    """The parent, seen from the test: one child at a time, whose lines it passes on."""

    def __init__(self, parent: asyncio.subprocess.Process) -> None:
        self._parent = parent
        self._child: int | None = None

    async def bear(self) -> None:
        """Have a child, and wait until it has said its first word."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(b"\n")
        self._child = int((await self.hear()).removeprefix("born "))

    async def hear(self) -> str:
        """The next line of the child; AssertionError where it ended by itself."""
        assert self._parent.stdout is not None
        line = (await asyncio.wait_for(self._parent.stdout.readline(), 60)).decode().strip()
        assert line not in ("", "dead"), "the child ended by itself"
        return line

    async def kill(self) -> list[str]:
        """Kill the child as hard as can be; what it said until it was dead."""
        assert self._child is not None and self._parent.stdout is not None
        os.kill(self._child, signal.SIGKILL)
        self._child = None
        lines: list[str] = []
        while (line := (await self._parent.stdout.readline()).decode().strip()) != "dead":
            lines.append(line)
        return lines

    async def close(self) -> None:
        """End the child, if one lives, and its parent."""
        if self._child is not None:
            await self.kill()
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        await self._parent.wait()


@asynccontextmanager
async def nursery(program: Path, *arguments: object) -> AsyncIterator[Nursery]:
    """A parent that runs `program`, which calls `raise_children`."""
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    command = [sys.executable, str(program), *map(str, arguments)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    opened = Nursery(await asyncio.create_subprocess_exec(*command, env=environment, **pipes))
    try:
        yield opened
    finally:
        await opened.close()


def raise_children(live: Callable[[], None]) -> None:
    """In the parent: fork a child that lives whenever asked for one, and tell when it is dead."""
    while sys.stdin.readline():
        child = os.fork()
        if child == 0:
            say(f"born {os.getpid()}")
            try:
                live()
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        say("dead")


def say(line: str) -> None:
    """Tell the test a line: all of it, or, where a kill comes first, nothing."""
    os.write(1, f"{line}\n".encode())
