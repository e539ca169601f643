"""Gateways killed with SIGKILL under load, again and again: what agents received is stored once, and the next one continues."""

import asyncio
from pathlib import Path

import pytest
from killable_process import times
from retrying_agents import kill_gateways

from penstock.pool.sqlite import SqlitePool, check_file


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gateways_killed_under_load_lose_and_repeat_nothing(tmp_path: Path) -> None:
    kills = times(100)

    async def main() -> None:
        pool = SqlitePool(tmp_path)
        await kill_gateways(tmp_path, pool, where=("sqlite", ""), gateways=1, kills=kills, answers=kills * 100)
        await pool.close()

    asyncio.run(main())
    assert check_file(tmp_path / "pool.db", lambda done, of: None).findings == []
