"""A durable pool that was tampered with: what is gone or changed is refused by every reader, and named by the check."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pool_cases import TASK, complete, finish, make_node, make_step, must_claim, open_groups, places, play
from postgres_server import server_url

from penstock.errors import PoolError
from penstock.pool import POOLS
from penstock.pool.base import Pool
from penstock.pool.check import PoolCheck
from penstock.pool.location import PoolLocation
from penstock.pool.postgres import PostgresDatabase, PostgresPool, schema_name
from penstock.records import Mark

pytestmark = pytest.mark.slow

DURABLE = [name for name in POOLS if POOLS.load(name).durable]


async def fill(pool: Pool) -> None:
    """A trained, a complete and a running group."""
    await complete(pool, 0, 1)
    await pool.ack((await must_claim(pool)).id, 3)
    await open_groups(pool, first=2)
    await pool.append(make_step("train-2.0.1"), make_node("train-2.0.1"))
    await pool.append(make_step("train-2.0.1", 1), make_node("train-2.0.1", 1, parent=0))
    await pool.mark(Mark(rollout_id="train-1.0.1", note="fine"))


def location_of(name: str, folder: Path) -> PoolLocation:
    return PoolLocation(name, folder, server_url() if name == "postgres" else "")


def verify(name: str, folder: Path) -> PoolCheck:
    location = location_of(name, folder)
    return location.kind.verify(folder, location.url, lambda done, total: None)


def change(name: str, folder: Path, statement: str) -> None:
    """Change a row behind the pool's back."""
    opened: Any = (
        sqlite3.connect(folder / "pool.db", isolation_level=None)
        if name == "sqlite"
        else PostgresDatabase(server_url(), schema_name(folder.name))
    )
    with closing(opened) as database:
        database.execute(statement)


@pytest.fixture(params=DURABLE)
def durable(request: pytest.FixtureRequest) -> str:
    return request.param


def test_pool_unchanged_written_is_sound_next_to_its_writer(durable: str, tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        await fill(pool)
        found = await asyncio.to_thread(verify, durable, tmp_path)
        assert (found.findings, found.groups, found.rollouts, found.steps) == ([], 3, 6, 6)
        await pool.open_group(TASK, places(3, 1), seq=3, min_size=1)
        lost = places(3, 1)[0]
        await finish(pool, await pool.replace(lost, "gone"))
        await pool.drop("train-1", "odd")
        await must_claim(pool)
        assert (await asyncio.to_thread(verify, durable, tmp_path)).findings == []
        location = location_of(durable, tmp_path)
        assert (location.kind.size_bytes(tmp_path, location.url) or 0) > 10_000

    play(durable, tmp_path, act)


async def attempt(pool: Pool, name: str) -> None:
    await pool.rollout(name)


async def group(pool: Pool, name: str) -> None:
    await pool.groups("train")


async def trained(pool: Pool, name: str) -> None:
    await pool.trained()


@pytest.mark.parametrize(
    ("statement", "read", "name"),
    [
        ("DELETE FROM grades WHERE rollout_id = 'train-1.0.1'", attempt, "train-1.0.1"),
        ("DELETE FROM marks WHERE rollout_id = 'train-1.0.1'", attempt, "train-1.0.1"),
        ("DELETE FROM steps WHERE rollout_id = 'train-1.0.1'", attempt, "train-1.0.1"),
        ("DELETE FROM steps WHERE rollout_id = 'train-2.0.1' AND id = 1", attempt, "train-2.0.1"),
        ("DELETE FROM nodes WHERE rollout_id = 'train-2.0.1' AND id = 1", attempt, "train-2.0.1"),
        ("UPDATE steps SET rollout_id = 'train-2.0.1', id = 2 WHERE rollout_id = 'train-1.0.1'", attempt, "train-2.0.1"),
        ("UPDATE rollouts SET message = 'other' WHERE id = 'train-1.0.1'", attempt, "train-1.0.1"),
        ("UPDATE rollouts SET ended = 'timeout' WHERE id = 'train-1.0.1'", attempt, "train-1.0.1"),
        ("UPDATE rollouts SET ended = NULL WHERE id = 'train-1.0.1'", attempt, "train-1.0.1"),
        ("UPDATE rollouts SET current = 0 WHERE id = 'train-1.0.1'", group, "train-1"),
        ("UPDATE rollouts SET group_id = 'train-1' WHERE id = 'train-2.0.1'", group, "train-1"),
        ("UPDATE groups SET seq = 7 WHERE id = 'train-1'", group, "train-1"),
        ("UPDATE groups SET min_size = 2 WHERE id = 'train-1'", group, "train-1"),
        ("UPDATE ledger SET version = 4", trained, "train-0"),
        ("DELETE FROM ledger", trained, "train-0"),
    ],
)
def test_what_is_gone_or_changed_is_refused_and_named(
    durable: str, tmp_path: Path, statement: str, read: Callable[[Pool, str], Any], name: str
) -> None:
    async def refused(pool: Pool) -> None:
        with pytest.raises(PoolError, match="damaged"):
            await read(pool, name)

    play(durable, tmp_path, fill)
    change(durable, tmp_path, statement.replace("'other'", "x'58'") if durable == "sqlite" else statement)
    play(durable, tmp_path, refused)
    assert any(name in f"{finding.id} {finding.what}" for finding in verify(durable, tmp_path).findings)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tally SET n = n + 1 WHERE kind = 'count' AND name = 'steps'",
        "UPDATE groups SET state = 'open' WHERE id = 'train-1'",
        "UPDATE groups SET oldest = 9 WHERE id = 'train-1'",
        "UPDATE groups SET state = 'trained' WHERE id = 'train-1'",
        "UPDATE changes SET channel = 'tain' WHERE position = 1",
        "DELETE FROM leases",
        "DELETE FROM lease_groups",
    ],
)
def test_what_only_the_whole_can_tell_is_named(durable: str, tmp_path: Path, statement: str) -> None:
    play(durable, tmp_path, fill)
    change(durable, tmp_path, statement)
    assert verify(durable, tmp_path).findings


def test_old_pool_format_is_migrated_before_the_check(tmp_path: Path) -> None:
    play("sqlite", tmp_path, fill)
    change("sqlite", tmp_path, "PRAGMA user_version = 1")
    [finding] = verify("sqlite", tmp_path).findings
    assert (finding.table, "earlier penstock" in finding.what) == ("file", True)


def test_postgres_that_cannot_be_reached_is_error_with_remedy(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"pool\.url"):
        PostgresPool.verify(tmp_path, f"postgresql://penstock@/postgres?host={tmp_path}", lambda done, total: None)
