"""A process that writes to the pool is killed with SIGKILL again and again: whatever it had acknowledged is there, once."""

import asyncio
from pathlib import Path

import pool_worker
import pytest
from acknowledged_writes import AcknowledgedWrites, kill_points
from killable_process import killable_process, times

from penstock.pool.sqlite import SqlitePool, check_file


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_acknowledged_step_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    kills, reported = times(100), AcknowledgedWrites()

    async def main() -> None:
        async with killable_process(Path(pool_worker.__file__), "sqlite", tmp_path, "", "alone", 60) as writers:
            for lines in kill_points("kills of the pool's writer", kills, kills * 600):
                await reported.run_until_killed(writers, lines)
        assert check_file(tmp_path / "pool.db", lambda done, of: None).findings == []
        pool = SqlitePool(tmp_path)
        await reported.check(pool)
        await pool.close()

    asyncio.run(main())
    assert reported.count("step") >= kills * 450
