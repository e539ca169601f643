"""Callers in a closed loop over raw sockets, so that the load generator costs as little as it can."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from urllib.parse import urlsplit

import orjson
import psutil

from bench.gateway.servers import FILLER, QUESTION, SECRET
from penstock.gateway.auth import GatewayTokens
from penstock.records import make_rollout

FILLER_TOKENS = 11
"""Of what a conversation is filled with."""
TOKENS = GatewayTokens(SECRET)


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of load."""

    callers: int
    context: int = 500
    """Tokens that a conversation begins with, about."""
    stream: bool = False
    wait_ms: int = 0
    """How long the engine takes before it answers."""
    between_ms: int = 0
    """How long it takes between two tokens of a stream."""
    seconds: float = 1.0
    calls: int = 0
    """How many calls each caller makes, in place of `seconds`: two servers that differ in speed then get the same bodies."""
    turns: int = 20
    """After which a caller goes back to the beginning of its conversation."""
    entries: int = 1
    """Messages that the context is spread over."""
    questions: int = 1
    """How many times a turn repeats its question."""


@dataclass(slots=True)
class Result:
    """What one server managed in one cell."""

    calls: int = 0
    errors: int = 0
    events: int = 0
    sent_bytes: int = 0
    """Of the bodies of all calls."""
    seconds: float = 0.0
    cpu_s: float = 0.0
    latencies: list[float] = field(default_factory=list[float])

    @property
    def cpu_us(self) -> float:
        """Processor time of the server per call, in microseconds."""
        return self.cpu_s / max(self.calls, 1) * 1e6

    @property
    def p50_ms(self) -> float:
        return median(self.latencies) * 1e3 if self.latencies else float("nan")


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> "Connection":
        """To the server at `url`."""
        at = urlsplit(url)
        return cls(*await asyncio.open_connection(at.hostname, at.port, limit=1 << 22))

    async def post(self, token: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of a call, chunks put together."""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        status = int(lines[0].split()[1])
        for line in lines:
            if line.startswith(b"content-length:"):
                return status, await self._reader.readexactly(int(line[15:]))
        parts: list[bytes] = []
        while size := int(await self._reader.readline(), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readline()
        return status, b"".join(parts)

    def close(self) -> None:
        self._writer.close()


async def load(url: str, process: psutil.Process, cell: Cell, *, token: str = "") -> Result:
    """Load a server as `cell` says. Every conversation is opened before anything is counted: what is measured is going on.

    Each caller has the token of a rollout of its own, unless one is given for all.
    """
    async with callers(url, cell, token=token) as them:
        return await go_on(them, process, cell)


@asynccontextmanager
async def callers(url: str, cell: Cell, *, token: str = "") -> AsyncGenerator[list["Caller"]]:
    """As many as `cell` says, each with a conversation that is open."""
    them = [Caller(await Connection.open(url), place, cell, token) for place in range(cell.callers)]
    try:
        async with asyncio.TaskGroup() as group:
            for caller in them:
                group.create_task(caller.begin())
        yield them
    finally:
        for caller in them:
            caller.line.close()


async def go_on(them: list["Caller"], process: psutil.Process, cell: Cell) -> Result:
    """Let all of them call as long as `cell` says."""
    result = Result()
    before, start = cpu_s(process), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for caller in them:
            group.create_task(caller.go_on(start + cell.seconds, result))
    result.seconds, result.cpu_s = time.perf_counter() - start, cpu_s(process) - before
    return result


def cpu_s(process: psutil.Process) -> float:
    """Processor time that a process has used. On Linux from its own clock: what psutil reads there moves in steps of 10 ms."""
    if sys.platform == "linux":
        return time.clock_gettime(~process.pid << 3 | 2)  # how the kernel names that clock; see clock_getcpuclockid(3)
    times = process.cpu_times()
    return times.user + times.system


class Caller:
    """One agent with its own rollout and a conversation that grows."""

    def __init__(self, line: Connection, place: int, cell: Cell, token: str) -> None:
        self.line = line
        self._place = place
        self._cell = cell
        self._token = token or TOKENS.model(make_rollout("train-0", "t", place).id)
        self._asked = {"role": "user", "content": QUESTION * cell.questions}
        self._opening: list[dict[str, str]] = []
        self._talk: list[dict[str, str]] = []

    async def begin(self) -> None:
        """Open a conversation that nobody had before."""
        nonce = f"{self._place} {time.perf_counter_ns()} "
        filler = FILLER * (self._cell.context // FILLER_TOKENS // self._cell.entries)
        roles = ["system", *(("user", "assistant")[place % 2] for place in range(self._cell.entries - 1))]
        self._opening = [{"role": role, "content": f"{nonce}{place} {filler}"} for place, role in enumerate(roles)] + [self._asked]
        self._talk = list(self._opening)
        await self._call(Result(), quick=True)

    async def go_on(self, end: float, result: Result) -> None:
        """Make calls until the time is over, or as many as the cell says."""
        made = 0
        while made < self._cell.calls if self._cell.calls else time.perf_counter() < end:
            await self._call(result)
            made += 1

    async def _call(self, result: Result, *, quick: bool = False) -> None:
        cell = self._cell
        seed = 0 if quick else cell.wait_ms * 1000 + cell.between_ms
        body = orjson.dumps({"model": "any", "messages": self._talk, "seed": seed, "stream": cell.stream and not quick})
        begun = time.perf_counter()
        status, answer = await self.line.post(self._token, body)
        result.latencies.append(time.perf_counter() - begun)
        result.calls += 1
        result.sent_bytes += len(body)
        result.errors += status != 200
        result.events += answer.count(b"data: ")
        if len(self._talk) >= len(self._opening) + 2 * (cell.turns - 1):
            self._talk = list(self._opening)
        elif status == 200:
            said = orjson.loads(answer)["choices"][0]["message"] if answer[:1] == b"{" else _said(answer)
            self._talk += [said, self._asked]


def _said(answer: bytes) -> dict[str, str]:
    events = [orjson.loads(part[6:]) for part in answer.split(b"\n\n") if part.startswith(b"data: {")]
    return {"role": "assistant", "content": "".join(event["choices"][0]["delta"].get("content") or "" for event in events)}
