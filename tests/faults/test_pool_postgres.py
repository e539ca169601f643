"""The shared pool under fire: writers and its server killed, and several processes at work on it at once."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pool_worker
import pytest
from acknowledged_writes import AcknowledgedWrites, kill_points
from killable_process import killable_process, times
from pool_worker import CLAIMED, TASK, Worker
from postgres_server import Server, server_program, server_url
from retrying_agents import kill_gateways

from penstock.chat.renderer import Renderer
from penstock.errors import PoolError
from penstock.pool.base import Pool
from penstock.pool.postgres import PostgresPool
from penstock.records import End, make_rollout
from penstock.testing import ScriptedEngine, workbench, write_tokenizer

WRITER = Path(pool_worker.__file__)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def durable_server() -> Iterator[Server]:
    """A server that syncs, as an ordinary one does."""
    if server_program("initdb") is None:
        pytest.skip("PostgreSQL is not installed; on Debian: apt install postgresql")
    server = Server(Path(tempfile.mkdtemp(prefix="pg-")), settings="")
    server.start()
    yield server
    server.remove()


def test_killed_postgres_writer_loses_no_acknowledged_step(tmp_path: Path) -> None:
    kills, reported, url = times(50), AcknowledgedWrites(), server_url()

    async def main() -> None:
        async with killable_process(WRITER, "postgres", tmp_path, url, "alone", 60) as writers:
            for lines in kill_points("kills of a writer to PostgreSQL", kills, kills * 300):
                await reported.run_until_killed(writers, lines)
        pool = PostgresPool(tmp_path, url=url)
        await reported.check(pool)
        await pool.close()

    asyncio.run(main())


class Patient:
    """A pool whose calls are made again, once the server is back, where it failed."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.up = asyncio.Event()
        self.up.set()
        self.failures = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*given: Any, **named: Any) -> Any:
            while True:
                try:
                    return await getattr(self._pool, name)(*given, **named)
                except PoolError:
                    self.failures += 1
                    await self.up.wait()

        return call


def test_crashed_server_has_everything_after_restart(tmp_path: Path, durable_server: Server) -> None:
    crashes, reported = times(10), AcknowledgedWrites()

    async def main() -> None:
        pool = PostgresPool(tmp_path, url=durable_server.url)
        patient = Patient(pool)
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(Worker(patient, reported.add).work(takes_up=True))  # type: ignore[arg-type]
            for lines in kill_points("crashes of PostgreSQL", crashes, crashes * 500):
                await reported.until(lines)
                await crash(durable_server, patient)
                with pytest.raises(PoolError, match="reached"):
                    await pool.stats()
                await asyncio.to_thread(durable_server.start)
                patient.up.set()
                reported.kills += 1
            await reported.until(500)
            worker.cancel()
        print(f"{patient.failures} calls failed and were made again")
        assert patient.failures > 0
        await reported.check(pool)
        await pool.close()

    asyncio.run(main())


async def crash(server: Server, patient: Patient) -> None:
    patient.up.clear()
    await asyncio.to_thread(server.stop, "immediate")


def test_two_processes_at_one_pool_lend_no_group_twice(tmp_path: Path) -> None:
    kills, reported, url = times(40), AcknowledgedWrites(), server_url()

    async def main() -> None:
        async def lives(lines: list[int]) -> None:
            async with killable_process(WRITER, "postgres", tmp_path, url, "with_others", 60) as writers:
                for each in lines:
                    await reported.run_until_killed(writers, each)

        cuts = kill_points("kills of two writers to PostgreSQL", kills, kills * 600)
        async with asyncio.TaskGroup() as both:
            both.create_task(lives(cuts[::2]))
            both.create_task(lives(cuts[1::2]))
        pool = PostgresPool(tmp_path, url=url)
        await reported.check(pool)
        await pool.close()

    asyncio.run(main())
    assert max(reported.lent.values()) == 1
    assert {line.split()[1] for line in reported.said if line.startswith("trained")} <= {line.split()[1] for line in reported.lent}


def test_the_groups_of_a_killed_trainer_come_back(tmp_path: Path) -> None:
    url, names = server_url(), {f"train-{seq}" for seq in range(CLAIMED)}

    async def main() -> None:
        pool = PostgresPool(tmp_path, url=url)
        for seq, name in enumerate(sorted(names)):
            rollout = make_rollout(name, TASK.id, 0)
            await pool.open_group(TASK, [rollout], seq=seq)
            await pool.end(rollout.id, End.COMPLETED)
        async with killable_process(WRITER, "postgres", tmp_path, url, "holds", 0.5) as trainers:
            await trainers.start()
            assert {await trainers.read_line() for _ in names} == {f"lent {name}" for name in names}
            assert await pool.claim(1, version=0, max_staleness=0, lease_s=60) is None
            await trainers.kill()
        async with asyncio.timeout(60):
            while (lease := await pool.claim(CLAIMED, version=0, max_staleness=0, lease_s=60)) is None:
                await pool.wait(await pool.position(), timeout_s=0.1)
        assert {group.id for group in lease.groups} == names
        await pool.close()

    asyncio.run(main())


def test_two_killed_gateways_lose_and_repeat_nothing(tmp_path: Path) -> None:
    kills, url = times(40), server_url()

    async def main() -> None:
        pool = PostgresPool(tmp_path, url=url)
        await kill_gateways(tmp_path, pool, where=("postgres", url), gateways=2, kills=kills, answers=kills * 100)
        await pool.close()

    asyncio.run(main())


def test_calls_wait_out_a_pool_whose_server_is_away(tmp_path: Path, durable_server: Server) -> None:
    """Neither a call nor an order from a runner is answered with anything but 503 meanwhile, also of rollouts not seen before."""
    renderer = Renderer.load(write_tokenizer(tmp_path / "model"))

    async def main() -> None:
        pool = PostgresPool(tmp_path, url=durable_server.url)
        engine = ScriptedEngine(lambda prompt: "42.", renderer.tokenizer)
        async with workbench(engine, renderer, pool=pool, serves=True) as bench:
            control, known = bench.http(bench.gateway.tokens.control), await bench.rollout()
            unseen = make_rollout("train-1", TASK.id, 0)
            await pool.open_group(TASK, [unseen], seq=1)
            orders = [
                ("/rollouts", {"rollout_id": "new"}),
                (f"/rollouts/{unseen.id}/grade", {"reward": 1}),
                (f"/rollouts/{unseen.id}/end", {}),
            ]

            async def statuses() -> list[int]:
                agents = [bench.http(known.token), bench.http(bench.gateway.tokens.model(unseen.id))]
                replies = [await agent.post("/v1/chat/completions", json={"messages": list(TASK.prompt)}) for agent in agents]
                replies += [await control.post(path, json=body) for path, body in orders]
                assert all(reply.status_code == 200 or reply.headers["retry-after"] == "1" for reply in replies)
                return [reply.status_code for reply in replies]

            await asyncio.to_thread(durable_server.stop, "immediate")
            assert await statuses() == [503] * 5
            await asyncio.to_thread(durable_server.start)
            assert await statuses() == [200] * 5
            assert [len((await pool.rollout(name)).steps) for name in (known.rollout_id, unseen.id)] == [1, 1]
        await pool.close()

    asyncio.run(main())
