"""The process that writes for others is killed, or outlives its starter: what it acknowledged is there, and nobody waits for it."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from pool_worker import TASK, make_node, make_step

from penstock.errors import PoolFailed
from penstock.pool.check import check_file
from penstock.pool.remote_writer import open_writer_process
from penstock.pool.sqlite import SqlitePool
from penstock.records import make_rollout
from penstock.system.processes import module_command

LANES, STEPS = 12, 200
STARTER = """
import asyncio, sys
from pathlib import Path
from penstock.pool.remote_writer import open_writer_process

async def main():
    async with open_writer_process(Path(sys.argv[1])) as address:
        print(address, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def writer_process_of(pid: int) -> psutil.Process:
    """The one that a process started; of a zombie among the others there is nothing to read."""
    found = psutil.process_iter(["ppid", "cmdline"])
    return next(
        each for each in found if each.info["ppid"] == pid and "penstock.pool.writer_process" in (each.info["cmdline"] or ())
    )


def test_what_a_killed_writer_process_had_acknowledged_is_stored_and_who_waits_is_told(tmp_path: Path) -> None:
    rollouts = [make_rollout("train-0", TASK.id, place) for place in range(LANES)]
    stored: list[tuple[str, int]] = []

    async def write(pool, rollout_id: str, process: psutil.Process) -> None:
        for index in range(STEPS):
            await pool.append(make_step(rollout_id, index), make_node(rollout_id, index))
            stored.append((rollout_id, index))
            if len(stored) == LANES * 20:
                process.kill()

    async def main() -> None:
        own = SqlitePool(tmp_path)
        await own.open_group(TASK, rollouts, seq=0)
        async with open_writer_process(tmp_path) as address:
            pool = SqlitePool(tmp_path, writer_address=address)
            lanes = [write(pool, rollout.id, writer_process_of(os.getpid())) for rollout in rollouts]
            ends = await asyncio.wait_for(asyncio.gather(*lanes, return_exceptions=True), 60)
            assert {type(end) for end in ends} == {PoolFailed} and "the same command goes on" in str(ends[0])
            with pytest.raises(PoolFailed):
                await pool.append(make_step(rollouts[0].id, STEPS), None)
            await pool.close()
        found = {rollout.id: (await own.attempt(rollout.id)).steps for rollout in rollouts}
        await own.close()
        assert len(stored) >= LANES * 20
        assert all(found[rollout_id][index] == make_step(rollout_id, index) for rollout_id, index in stored)

    asyncio.run(main())
    assert check_file(tmp_path / "pool.db", lambda done, of: None).findings == []


def test_a_writer_process_writes_for_those_that_are_left_when_its_starter_is_killed_and_ends_with_the_last(tmp_path: Path) -> None:
    rollout = make_rollout("train-0", TASK.id, 0)

    async def main(starter: subprocess.Popen[str], address: str) -> None:
        pool = SqlitePool(tmp_path, writer_address=address)
        await pool.open_group(TASK, [rollout], seq=0)
        await pool.append(make_step(rollout.id, 0), make_node(rollout.id, 0))
        starter.kill()
        starter.wait()
        await pool.append(make_step(rollout.id, 1), make_node(rollout.id, 1))
        assert len((await pool.attempt(rollout.id)).steps) == 2
        await pool.close()

    asyncio.run(SqlitePool(tmp_path).close())
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        address = starter.stdout.readline().strip()
        writer = writer_process_of(starter.pid)
        asyncio.run(main(starter, address))
    gone, _ = psutil.wait_procs([writer], timeout=30)
    assert gone and not Path(address).parent.exists()


def test_one_whose_starter_is_gone_before_it_said_anything_ends_without_a_word() -> None:
    ended = subprocess.run(
        module_command("penstock.pool.writer_process"), stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


def test_a_pool_that_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pool.db").write_bytes(b"no database at all" * 1000)

    async def main() -> None:
        async with open_writer_process(tmp_path):
            raise AssertionError("it opened")

    with pytest.raises(PoolFailed, match="not a penstock pool, or it is damaged"):
        asyncio.run(main())


def test_a_temporary_folder_whose_path_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    async def main() -> None:
        await SqlitePool(tmp_path).close()
        async with open_writer_process(tmp_path):
            raise AssertionError("it listened")

    with pytest.raises(PoolFailed, match="TMPDIR"):
        asyncio.run(main())
