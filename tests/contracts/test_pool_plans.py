"""No statement of the SQLite pool looks through a whole table: what it costs must not grow with what is stored."""

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from pool_cases import TASK, complete, make_node, make_step, must_claim, open_groups, places

from penstock.pool import sqlite
from penstock.pool.base import GroupLimit
from penstock.pool.sqlite import SqlitePool
from penstock.records import End, Grade, Mark

GROWING = re.compile(r"SCAN (nodes|steps|grades|marks|rollouts|groups|changes|lease_groups|ledger)\b")
WHOLE = ("FROM ledger", "AS counted GROUP BY", "ORDER BY position DESC LIMIT 1")
"""Reads of a whole table that are asked for as such (the ledger, the check of a resumed pool), and the end of an index."""


async def live(folder: Path) -> None:
    """Everything that a run does, several appends and ends together included."""
    pool = SqlitePool(folder)
    await complete(pool, 0, 1)
    await open_groups(pool, first=2, size=8)
    async with asyncio.TaskGroup() as group:
        for rollout in places(2, 8):
            group.create_task(pool.append(make_step(rollout.id), make_node(rollout.id)))
    async with asyncio.TaskGroup() as group:
        for rollout in places(2, 8):
            group.create_task(pool.append(make_step(rollout.id, 1), make_node(rollout.id, 1, parent=0)))
            group.create_task(pool.append(make_step(rollout.id, 2, node=0), None))
    await pool.replace(places(2, 8)[0], "lost")
    await pool.end(places(2, 8)[1].id, End.TIMEOUT, "late")
    await pool.mark(Mark(rollout_id=places(2, 8)[1].id, step=1))
    await open_groups(pool, 2, first=4, size=4)
    async with asyncio.TaskGroup() as group:
        for rollout in [*places(4, 4), *places(5, 4)]:
            group.create_task(pool.end(rollout.id, End.COMPLETED, "", [Grade(rollout_id=rollout.id, reward=1.0, source="g")]))
    await pool.open_group(TASK, places(3), seq=None, min_size=2, limit=GroupLimit(9, "drop"))
    lease = await must_claim(pool)
    await pool.renew(lease.id, 60)
    await pool.ack(lease.id, 1)
    await pool.release()
    await pool.rollout(places(2, 8)[2].id)
    await pool.task(places(2, 8)[2].id)
    await pool.unfinished("train")
    await pool.groups("train", first_seq=1)
    await pool.stats()
    await pool.stats("train")
    await pool.changes(await pool.position())
    await pool.close()


def test_every_statement_finds_its_rows_by_an_index(tmp_path: Path, monkeypatch) -> None:
    said: set[str] = set()
    plain = sqlite.open_database

    def listening(path: Path, **options: object) -> sqlite3.Connection:
        database = plain(path, **options)
        database.set_trace_callback(said.add)
        return database

    monkeypatch.setattr("penstock.pool.sqlite.open_database", listening)  # SQLite reports its statements to no one else
    asyncio.run(live(tmp_path))
    monkeypatch.undo()
    asked = [text for text in said if re.match("(SELECT|WITH|UPDATE|INSERT|DELETE)", text) and not any(w in text for w in WHOLE)]
    with closing(plain(tmp_path / "pool.db")) as database:
        plans = {text: " | ".join(row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {text}")) for text in asked}
    assert len(plans) > 60
    assert {text[:200]: plan for text, plan in plans.items() if GROWING.search(plan)} == {}
    of_channel = [plan for text, plan in plans.items() if "FROM tally WHERE channel = 'train' GROUP BY" in text]
    assert of_channel
    assert not any("SCAN tally" in plan for plan in of_channel)
