"""Requests that nobody should send, over sockets to every route of every server: none fails, grows or stalls.

A failure names the seed and shows the request. PENSTOCK_FUZZ_SEED takes the seed, PENSTOCK_FUZZ_REQUESTS how many there are in all.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import fuzz_server
import pytest
from fuzz_requests import PER_ROLLOUT, FuzzRequest, RequestMaker
from killable_process import ALLOCATOR, FULL

REQUESTS = int(os.environ.get("PENSTOCK_FUZZ_REQUESTS") or (100_000 if FULL else 2_000))
SEED = os.environ.get("PENSTOCK_FUZZ_SEED", "1")
SHARES = {"gateway": 0.45, "open gateway": 0.1, "controller": 0.25, "rollout server": 0.12, "callbacks": 0.08, "view": 0.15}
CALLERS = 12
ANSWER_S, HALF_S = 240, 2
STALL_S = 0.2
"""The longest that a loop may not turn; computing time of the process, since other programs share the machine."""
GROWTH_MB = 8
"""From the first half of the requests, in which caches fill, to the last one; SQLite's page caches are up to 2 MB a connection."""


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def fault(self, request: FuzzRequest) -> str | None:
        """What is wrong with the answer."""
        if self.status >= 400 and request.method != "HEAD":
            try:
                reported = json.loads(self.body)
            except ValueError:  # of a wrong range, Starlette reports in plain text
                return (
                    None
                    if self.status in (400, 416) and "text/plain" in self.headers["content-type"]
                    else f"no JSON: {self.body[:200]!r}"
                )
            if not (reported.get("error") or reported.get("detail")):
                return f"{self.status} without a reason: {self.body[:200]!r}"
        if self.status < 500 or self._may_fail(request):
            return None
        return f"{self.status} {self.body[:500]!r}"

    def _may_fail(self, request: FuzzRequest) -> bool:
        """Whether a 5xx is true: HTTP that is not supported, or a server that is busy and says when to come again."""
        protocol = {501: b"transfer_encoding", 505: b"http_version"}.get(self.status)
        if protocol is not None:
            return request.method == "HEAD" or protocol in self.body
        return self.status == 503 and "retry-after" in self.headers


class Connection:
    """One caller's connection, opened again when the server has closed it."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, request: FuzzRequest) -> Answer | None:
        """Send a request; None if the server closed without an answer, or none is awaited."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        try:
            writer.write(request.raw)
            if not request.answers:
                await writer.drain()
                self.close()
                return None
            answer = await self._answer(reader, request)
            if answer is None or not request.method or answer.headers.get("connection") == "close":
                self.close()
            return answer
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            return None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _answer(self, reader: asyncio.StreamReader, request: FuzzRequest) -> Answer | None:
        status, headers = 100, dict[str, str]()
        while status == 100:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status, headers = int(head[0].split(" ")[1]), dict(line.lower().split(": ", 1) for line in head[1:-2])
        if request.method == "HEAD" or status in (204, 304):
            return Answer(status, headers, b"")
        if "content-length" in headers:
            return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
        if "transfer-encoding" not in headers:
            return Answer(status, headers, await reader.read())
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return Answer(status, headers, body)


@asynccontextmanager
async def served(kind: str, folder: Path):
    """Yield the targets of a server process, and a function that asks for its report."""
    errors = (folder / "stderr").open("wb")
    command = (sys.executable, fuzz_server.__file__, kind, str(folder / kind))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=errors, limit=1 << 24, env=os.environ | ALLOCATOR
    )

    async def report():
        process.stdin.write(b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), ANSWER_S)
        assert line, f"the {kind} died:\n{(folder / 'stderr').read_text()[-3000:]}"
        return json.loads(line)

    try:
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        assert line, (folder / "stderr").read_text()[-3000:]
        yield json.loads(line)["targets"], report
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 60)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            errors.close()


class Fuzzer:
    """Sends a target's requests, several at once."""

    def __init__(self, target) -> None:
        self.target, self.maker = target, RequestMaker(target, SEED)
        self.statuses, self.routes, self.faults = Counter(), dict[str, Counter[int]](), list[str]()
        self._next = 0

    async def send(self, until: int) -> None:
        """Send the requests up to a number."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._call(until))

    async def _call(self, until: int) -> None:
        connection = Connection(self.target["url"])
        while (number := self._next) < until and len(self.faults) < 20:
            self._next += 1
            await self._open_rollout(connection, number)
            request = self.maker.make(number)
            try:
                answer = await asyncio.wait_for(connection.exchange(request), ANSWER_S if request.method else HALF_S)
            except Exception as error:
                connection.close()
                if request.method or not isinstance(error, TimeoutError):  # half a head gets a 408, but only after half a minute
                    self.faults.append(f"{type(error).__name__} {error} to {request}")
                    continue
                answer = None
            self._note(request, answer)
        connection.close()

    def _note(self, request: FuzzRequest, answer: Answer | None) -> None:
        status = answer.status if answer else 0
        self.statuses[status] += 1
        self.routes.setdefault(request.route, Counter())[status] += 1
        if answer and (fault := answer.fault(request)):
            self.faults.append(f"{fault} to {request}")

    async def _open_rollout(self, connection: Connection, number: int) -> None:
        if "secret" not in self.target or number % PER_ROLLOUT:
            return
        control, body = self.maker._tokens.control, json.dumps({"rollout_id": self.maker.rollout(number)}).encode()
        head = (
            f"POST /rollouts HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {control}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        opened = await connection.exchange(FuzzRequest(-1, "", "POST", head.encode() + body))
        assert opened and opened.status in (200, 409, 410), opened and opened.body  # other callers may have opened or ended it


@pytest.mark.slow
@pytest.mark.timeout(86_400 if FULL else 300)
@pytest.mark.parametrize("kind", fuzz_server.KINDS)
def test_no_request_makes_a_server_fail_grow_or_stall(kind, tmp_path):
    async def main():
        async with served(kind, tmp_path) as (targets, report):
            fuzzers = [Fuzzer(target) for target in targets]
            for fuzzer in fuzzers:
                await fuzzer.send(round(REQUESTS * SHARES[fuzzer.target["name"]] / 2))
            warm = await report()
            for fuzzer in fuzzers:
                await fuzzer.send(round(REQUESTS * SHARES[fuzzer.target["name"]]))
            await asyncio.sleep(0)  # in which the callers' transports close
            return fuzzers, warm, await report()

    fuzzers, warm, end = asyncio.run(main())
    growth = end["rss_mb"] - warm["rss_mb"]
    for fuzzer in fuzzers:
        print(f"{fuzzer.target['name']}: {fuzzer.statuses.total()} requests {dict(sorted(fuzzer.statuses.items()))}")
        if os.environ.get("PENSTOCK_FUZZ_ROUTES"):
            print(*(f"  {route}: {dict(sorted(found.items()))}" for route, found in sorted(fuzzer.routes.items())), sep="\n")
    stalls = f"longest stall {end['stall_s']:.3f} s of computing, {end['wall_stall_s']:.3f} s in all"
    print(f"{kind}: {end['rss_mb']:.0f} MB at the end, {growth:+.0f} MB, most {end['peak_mb']:.0f} MB; {stalls}")
    stderr = (tmp_path / "stderr").read_text()
    problems = [f"{fuzzer.target['name']}: {fault}" for fuzzer in fuzzers for fault in fuzzer.faults[:5]]
    problems += end["errors"][:5] + ([stderr[-3000:]] if "Traceback" in stderr else [])
    if end["stall_s"] > STALL_S:
        problems.append(f"the loop stalled for {end['stall_s']:.3f} s in one of:\n{shown(fuzzers, max(end['stalls'])[1])}")
    if growth > GROWTH_MB:
        problems.append(f"{growth:.0f} MB more after the second half of the requests")
    assert not problems, f"seed {SEED}, {REQUESTS} requests in all:\n" + "\n".join(problems)
    for fuzzer in fuzzers:
        assert fuzzer.statuses.total() < 10 * len(fuzzer.maker.routes) or set(fuzzer.routes) == {
            f"{method} {path}" for method, path, _ in fuzzer.maker.routes
        }, "a route got no request"


def shown(fuzzers, numbers):
    """Requests by the name of their target and their number."""
    makers = {fuzzer.target["name"]: fuzzer.maker for fuzzer in fuzzers}
    named = [number.rpartition("/") for number in numbers if "/" in number]
    return "\n".join(f"{name}: {makers[name].make(int(number))}" for name, _, number in named)
