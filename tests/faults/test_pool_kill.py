"""A process that writes to the pool is killed with SIGKILL again and again: whatever it had acknowledged is there, once."""

import asyncio
from pathlib import Path

import pool_writer
import pytest
from acknowledged import Acknowledged, moments
from nursery import nursery, times

from penstock.pool.check import check_file
from penstock.pool.sqlite import open_pool


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_acknowledged_step_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    kills, told = times(100), Acknowledged()

    async def main() -> None:
        async with nursery(Path(pool_writer.__file__), "sqlite", tmp_path, "", "alone", 60) as writers:
            for lines in moments("kills of the pool's writer", kills, kills * 600):
                await told.life(writers, lines)
        assert check_file(tmp_path / "pool.db", lambda done, of: None).findings == []
        pool = open_pool(tmp_path)
        await told.check(pool)
        await pool.close()

    asyncio.run(main())
    assert told.count("step") >= kills * 450
