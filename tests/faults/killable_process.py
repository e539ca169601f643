"""Processes for tests to kill. A parent that has imported everything forks them, so each starts in milliseconds."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

FULL = os.environ.get("PENSTOCK_FAULTS") == "full"
"""Whether to run the full number of kills, which takes minutes, or a tenth of it."""
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Environment in which glibc gives freed memory back to the system, so that what is measured is what a process holds."""


def times(full: int) -> int:
    """`full`, or a tenth of it unless FULL is set."""
    return full if FULL else full // 10


class KillableProcess:
    """Controls the parent from the test: one child at a time; the lines that the child writes are read here."""

    def __init__(self, parent: asyncio.subprocess.Process) -> None:
        self._parent = parent
        self._child: int | None = None

    async def start(self) -> None:
        """Fork a child and wait until it runs."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(b"\n")
        self._child = int((await self.read_line()).removeprefix("started "))

    async def read_line(self) -> str:
        """Return the child's next line; raises AssertionError if the child exited on its own."""
        assert self._parent.stdout is not None
        line = (await asyncio.wait_for(self._parent.stdout.readline(), 60)).decode().strip()
        assert line not in ("", "exited"), "the child ended on its own"
        return line

    async def kill(self) -> list[str]:
        """Kill the child with SIGKILL; returns the lines it wrote before it died."""
        assert self._child is not None and self._parent.stdout is not None
        os.kill(self._child, signal.SIGKILL)
        self._child = None
        lines: list[str] = []
        while (line := (await self._parent.stdout.readline()).decode().strip()) != "exited":
            lines.append(line)
        return lines

    async def close(self) -> None:
        """Kill the child, if one runs, and end the parent."""
        if self._child is not None:
            await self.kill()
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        await self._parent.wait()


@asynccontextmanager
async def killable_process(program: Path, *arguments: object) -> AsyncIterator[KillableProcess]:
    """Start a parent that runs `program`, which must call `fork_on_request`."""
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    command = [sys.executable, str(program), *map(str, arguments)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    opened = KillableProcess(await asyncio.create_subprocess_exec(*command, env=environment, **pipes))
    try:
        yield opened
    finally:
        await opened.close()


def fork_on_request(live: Callable[[], None]) -> None:
    """In the parent: for each request, fork a child that calls `live`, and report when it has exited."""
    while sys.stdin.readline():
        child = os.fork()
        if child == 0:
            write_line(f"started {os.getpid()}")
            try:
                live()
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        write_line("exited")


def write_line(line: str) -> None:
    """Write one line to the test in one system call: a kill leaves the whole line or nothing."""
    os.write(1, f"{line}\n".encode())
