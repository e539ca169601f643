"""Several worker processes of one gateway, killed under load: nothing that an agent was told is lost or there twice."""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from httpx2 import AsyncClient, HTTPError, Limits
from upstream_cases import FakeVllm

from penstock.gateway.graph import prompts
from penstock.pool.sqlite import SqlitePool
from penstock.records import Attempt
from penstock.system import signal_watcher
from penstock.testing import write_tokenizer

WORKERS = 2


def is_worker(child: psutil.Process) -> bool:
    """Whether it runs, and is not the process that watches for signals."""
    try:
        return child.status() != psutil.STATUS_ZOMBIE and signal_watcher.__file__ not in child.cmdline()
    except psutil.NoSuchProcess:
        return False


@dataclass
class Gate:
    """A running `penstock gateway`, and what agents were told by it."""

    process: asyncio.subprocess.Process
    ready: dict[str, Any]
    folder: Path
    http: AsyncClient
    told: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Rollout → names of the answers that arrived."""
    answered: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Of what was told, or said on stderr."""
    said: str = ""

    def token(self, kind: str) -> str:
        return json.loads(Path(self.ready["tokens"]).read_text())[kind]

    @property
    def workers(self) -> list[psutil.Process]:
        return list(filter(is_worker, psutil.Process(self.process.pid).children()))

    async def post(self, path: str, token: str, body: Any, *, tries: int = 1) -> Any:
        """Each time on a new connection, so that any worker may get it; sent again as an SDK does."""
        for attempt in count():
            headers = {"authorization": f"Bearer {token}", "connection": "close", "x-stainless-retry-count": str(attempt)}
            try:
                response = await self.http.post(path, json=body, headers=headers)
            except HTTPError:
                if attempt + 1 >= tries:
                    raise
                continue
            if response.status_code < 500 or attempt + 1 >= tries:
                return response
        raise AssertionError

    async def rollout(self) -> dict[str, str]:
        return (await self.post("/rollouts", self.token("control"), {}, tries=20)).json()

    async def agent(self, opened: dict[str, str], name: str, turns: int) -> None:
        """One conversation: every answer that arrives is remembered."""
        talk: list[dict[str, Any]] = [{"role": "user", "content": f"I am {name}. Go on."}]
        for turn in range(turns):
            body = {"model": "any", "messages": talk, "max_tokens": 12}
            response = await self.post("/v1/chat/completions", opened["token"], body, tries=200)
            assert response.status_code == 200, response.text
            answer = response.json()
            talk += [answer["choices"][0]["message"], {"role": "user", "content": f"Turn {turn}."}]
            async with self.answered:
                self.told.setdefault(opened["rollout_id"], []).append(answer["id"].removeprefix("chatcmpl-"))
                self.answered.notify_all()

    async def kill_after(self, answers: int) -> None:
        """Kill a worker once so many answers have come, and wait until another one serves."""
        async with self.answered:
            await self.answered.wait_for(lambda: sum(map(len, self.told.values())) >= answers)
        before = self.said.count("serves again")
        random.choice(self.workers).send_signal(signal.SIGKILL)
        async with self.answered:
            await self.answered.wait_for(lambda: self.said.count("serves again") > before)

    async def listen(self) -> None:
        """Take in all that is said on stderr, as long as anything is."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            async with self.answered:
                self.said += line.decode()
                self.answered.notify_all()

    async def attempts(self) -> list[Attempt]:
        pool = SqlitePool(self.folder)
        try:
            return [attempt for group in await pool.groups("adhoc", limit=1000) for attempt in group.attempts]
        finally:
            await pool.close()


@asynccontextmanager
async def gate(folder: Path, server: FakeVllm) -> AsyncIterator[Gate]:
    model = write_tokenizer(folder / "model")
    options = ["--engine", "vllm", "--url", server.url, "--model", str(model), "--folder", str(folder / "run")]
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "gateway", *options, "--workers", str(WORKERS)]
    environment = {name: value for name, value in os.environ.items() if "PROXY" not in name.upper()}
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, env=environment, **pipes)
    assert process.stdout is not None and process.stderr is not None
    line = await process.stdout.readline()
    assert line, (await process.stderr.read()).decode()
    ready = json.loads(line)
    base_url = ready["base_url"].removesuffix("/v1")
    async with AsyncClient(base_url=base_url, timeout=60, trust_env=False, limits=Limits(max_keepalive_connections=0)) as http:
        gateway = Gate(process, ready, folder / "run", http)
        listening = asyncio.create_task(gateway.listen())
        try:
            yield gateway
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            await listening
            print(gateway.said)


def play(folder: Path, case: Callable[[Gate, FakeVllm], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(200), FakeVllm() as server, gate(folder, server) as gateway:
            await case(gateway, server)

    asyncio.run(main())


def check(attempt: Attempt, told: list[str], seen: set[tuple[int, ...]]) -> None:
    """Dense numbers, one step for each answer that arrived and none besides, and each prompt exactly what came before."""
    assert [step.index for step in attempt.steps] == list(range(len(attempt.steps)))
    assert [node.id for node in attempt.nodes] == list(range(len(attempt.nodes)))
    assert sorted(step.answer for step in attempt.steps) == sorted(told)
    assert len(set(told)) == len(told)
    assert [node.reason for node in attempt.nodes if node.reason] == []
    sampled_after, nodes = prompts(attempt), {node.id: node for node in attempt.nodes}
    for step in attempt.steps:
        assert sampled_after[step.index] in seen, "the engine got another prompt than is recorded"
        if (parent := nodes[step.node].parent) is not None:
            before = sampled_after[parent] + attempt.steps[parent].completion_ids
            assert sampled_after[step.index][: len(before)] == before


@pytest.mark.slow
def test_workers_killed_under_load_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    rollouts, agents, turns, kills = 8, 3, 6, 3

    async def case(gateway: Gate, server: FakeVllm) -> None:
        opened = [await gateway.rollout() for _ in range(rollouts)]
        async with asyncio.TaskGroup() as group:
            for each in opened:
                for number in range(agents):
                    group.create_task(gateway.agent(each, f"agent {number}", turns))
            for number in range(1, kills + 1):
                await gateway.kill_after(number * rollouts * agents * turns // (kills + 1))
        attempts = await gateway.attempts()
        seen = {tuple(request["prompt"]) for request in server.requests}
        assert len(attempts) == rollouts
        for attempt in attempts:
            assert len(gateway.told[attempt.rollout.id]) == agents * turns
            check(attempt, gateway.told[attempt.rollout.id], seen)

    play(tmp_path, case)


@pytest.mark.slow
def test_the_same_call_made_many_times_at_once_is_as_many_answers(tmp_path: Path) -> None:
    async def case(gateway: Gate, server: FakeVllm) -> None:
        opened = await gateway.rollout()
        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(gateway.agent(opened, "one of many", 2))
        [attempt] = await gateway.attempts()
        check(attempt, gateway.told[opened["rollout_id"]], {tuple(request["prompt"]) for request in server.requests})
        assert len(attempt.steps) == 80

    play(tmp_path, case)


@pytest.mark.slow
def test_metrics_are_those_of_all_workers_and_do_not_go_back_when_one_dies(tmp_path: Path) -> None:
    async def case(gateway: Gate, server: FakeVllm) -> None:
        async def steps() -> float:
            headers = {"authorization": f"Bearer {gateway.token('admin')}", "connection": "close"}
            try:
                text = (await gateway.http.get("/metrics", headers=headers)).text
            except HTTPError:  # it was the worker that died
                return -1.0
            return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("penstock_steps_total"))

        opened = await gateway.rollout()
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(gateway.agent(opened, f"agent {number}", 1))
        in_a_row = 0
        while in_a_row < 20:  # then all have saved their counts, and whichever is asked knows them
            in_a_row = in_a_row + 1 if await steps() == 20 else 0
        await gateway.kill_after(0)
        for _ in range(20):
            assert await steps() in (-1.0, 20.0)

    play(tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_workers_go_with_their_parent(tmp_path: Path, number: int, code: int) -> None:
    async def case(gateway: Gate, server: FakeVllm) -> None:
        workers = gateway.workers
        assert len(workers) == WORKERS
        gateway.process.send_signal(number)
        assert await gateway.process.wait() == code
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 30)
        assert alive == []

    play(tmp_path, case)
