"""What durable pools promise across restarts, processes and full disks."""

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from pool_cases import (
    DURABLE,
    TASK,
    FakeClock,
    claim,
    complete,
    ids,
    make_node,
    make_step,
    must_claim,
    open_groups,
    open_one,
    places,
    play,
)

from penstock.errors import PoolError, PoolFailed
from penstock.pool.base import Pool
from penstock.pool.rows import encode_row
from penstock.pool.sqlite import APPLICATION_ID, MIGRATIONS, open_database
from penstock.records import End, Mark


@pytest.fixture(params=DURABLE)
def durable(request: pytest.FixtureRequest) -> str:
    return request.param


def test_an_acknowledged_append_is_there_after_reopening(durable: str, tmp_path: Path) -> None:
    async def write(pool: Pool) -> None:
        await complete(pool, 0)
        await pool.ack((await must_claim(pool)).id, 3)
        await open_groups(pool, first=1)
        await pool.append(make_step("train-1.0.1"), make_node("train-1.0.1"))

    async def read(pool: Pool) -> None:
        attempt = await pool.rollout("train-1.0.1")
        assert (attempt.steps, attempt.nodes) == ((make_step("train-1.0.1"),), (make_node("train-1.0.1"),))
        assert await pool.trained() == [("train-0", 3)]
        assert ids(await pool.unfinished("train")) == ["train-1"]

    for act in (write, read, read):
        play(durable, tmp_path, act)


def test_lease_of_a_dead_process_returns(durable: str, tmp_path: Path) -> None:
    async def take(pool: Pool) -> None:
        await complete(pool, 0, 1)
        await must_claim(pool, lease_s=60.0)
        await must_claim(pool, lease_s=600.0)

    later = FakeClock()
    later.now = -7e6

    async def start(pool: Pool) -> None:
        later.now += 59.0
        assert await claim(pool) is None
        later.now += 1.0
        assert ids((await must_claim(pool)).groups) == ["train-0"]
        await pool.release()
        assert ids((await must_claim(pool, 2)).groups) == ["train-0", "train-1"]

    play(durable, tmp_path, take)
    play(durable, tmp_path, start, clock=later)


def test_two_openers_share_one_truth(durable: str, tmp_path: Path) -> None:
    async def act(mine: Pool) -> None:
        clock = FakeClock()
        theirs: Pool = open_one(durable, tmp_path, clock=clock)
        await complete(mine, 0)
        lease = await must_claim(mine)
        assert await claim(theirs) is None
        clock.now += 59.0
        await mine.renew(lease.id, 60.0)
        assert await claim(theirs) is None
        clock.now += 59.0
        assert await claim(theirs) is None
        clock.now += 1.0
        assert (await must_claim(theirs)).groups == lease.groups
        await theirs.close()

    play(durable, tmp_path, act)


def test_closed_pool_reports_it(durable: str, tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        await pool.close()
        with pytest.raises(PoolError, match="closed"):
            await open_groups(pool)
        with pytest.raises(PoolError, match="closed"):
            await pool.stats()

    play(durable, tmp_path, act)


def test_closing_finishes_what_was_handed_over(durable: str, tmp_path: Path) -> None:
    async def write(pool: Pool) -> None:
        async with asyncio.TaskGroup() as tasks:
            for seq in range(20):
                tasks.create_task(open_groups(pool, first=seq))
            await asyncio.sleep(0)
            await pool.close()

    async def read(pool: Pool) -> None:
        assert (await pool.stats()).groups == 20

    play(durable, tmp_path, write)
    play(durable, tmp_path, read)


def test_a_cancelled_claim_keeps_nothing(durable: str, tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        await complete(pool, 0)
        for turns in range(4):
            task = asyncio.create_task(claim(pool))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert ids((await must_claim(pool)).groups) == ["train-0"]

    play(durable, tmp_path, act)


# the SQLite file


def test_full_disk_refuses_writes_and_recovers_when_space_returns(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        with closing(sqlite3.connect(tmp_path / "pool.db", isolation_level=None)) as other:
            other.execute("CREATE TABLE ballast AS SELECT zeroblob(400000) AS bytes")
            big = make_step("train-0.0.1", message={"role": "assistant", "content": "x" * 300_000})
            with pytest.raises(PoolError, match="space"):
                await pool.append(big, make_node("train-0.0.1"))
            assert (await pool.rollout("train-0.0.1")).nodes == ()
            await pool.append(make_step("train-0.1.1"), make_node("train-0.1.1"))
            other.execute("DROP TABLE ballast")
        await pool.append(big, make_node("train-0.0.1"))
        assert (await pool.rollout("train-0.0.1")).steps == (big,)

    play("sqlite", tmp_path, act, max_pages=100)


def test_one_refused_write_does_not_fail_its_neighbours(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, size=40)
        await pool.end("train-0.5.1", End.CANCELLED)

        async def write(rollout_id: str) -> bool:
            try:
                await pool.append(make_step(rollout_id), make_node(rollout_id))
            except PoolError:
                return False
            return True

        async with asyncio.TaskGroup() as tasks:
            writes = [tasks.create_task(write(rollout.id)) for rollout in places(0, 40)]
        assert [place for place, task in enumerate(writes) if not task.result()] == [5]
        assert (await pool.stats()).steps == 39

    play("sqlite", tmp_path, act)


def test_neighbours_of_write_too_big_for_disk_are_kept(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool, size=9)
        texts = ["x" * (2_000_000 if place == 4 else 10) for place in range(9)]

        async def write(rollout_id: str, text: str) -> bool:
            try:
                await pool.append(make_step(rollout_id, message={"content": text}), make_node(rollout_id))
            except PoolError:
                return False
            return True

        async with asyncio.TaskGroup() as tasks:
            writes = [tasks.create_task(write(rollout.id, text)) for rollout, text in zip(places(0, 9), texts, strict=True)]
        assert [task.result() for task in writes].count(False) == 1
        assert (await pool.stats()).steps == 8

    play("sqlite", tmp_path, act, max_pages=120)


def test_more_writers_than_the_queue_holds_all_get_through(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        async with asyncio.TaskGroup() as tasks:
            for seq in range(1500):
                tasks.create_task(open_groups(pool, first=seq, size=1))
        assert (await pool.stats()).groups == 1500

    play("sqlite", tmp_path, act)


@pytest.mark.parametrize("column", ["record", "completion_ids", "logprobs", "versions"])
def test_flipped_bit_in_step_is_noticed_and_its_rollout_named(tmp_path: Path, column: str) -> None:
    async def write(pool: Pool) -> None:
        await complete(pool, 0, 1)

    async def read(pool: Pool) -> None:
        with pytest.raises(PoolError, match=r"train-0\.1\.1"):
            await pool.rollout("train-0.1.1")
        with pytest.raises(PoolError, match=r"train-0\.1\.1"):
            await must_claim(pool, 2)
        assert (await pool.stats()).groups_leased == 0
        assert (await pool.groups("train", first_seq=1))[0].rewards == [1.0, 1.0]

    play("sqlite", tmp_path, write)
    with closing(sqlite3.connect(tmp_path / "pool.db")) as other, other:
        query = f"SELECT {column} FROM steps WHERE rollout_id = 'train-0.1.1'"
        blob = bytearray(other.execute(query).fetchone()[0])
        blob[len(blob) // 2] ^= 4
        other.execute(f"UPDATE steps SET {column} = ? WHERE rollout_id = 'train-0.1.1'", (bytes(blob),))
    play("sqlite", tmp_path, read)


def test_file_that_is_not_pool_is_rejected_and_left_alone(tmp_path: Path) -> None:
    text, foreign, newer = tmp_path / "text", tmp_path / "foreign", tmp_path / "newer"
    for folder in (text, foreign, newer):
        folder.mkdir()
    (text / "pool.db").write_bytes(b"these are not the bytes you are looking for" * 100)
    with closing(sqlite3.connect(foreign / "pool.db")) as other:
        other.execute("CREATE TABLE contacts (name TEXT)")
    play("sqlite", newer, open_groups)
    with closing(sqlite3.connect(newer / "pool.db")) as other:
        other.execute("PRAGMA user_version = 99")
    for folder, remedy in ((text, "not a penstock pool"), (foreign, "not a penstock pool"), (newer, "upgrade penstock")):
        before = (folder / "pool.db").read_bytes()
        with pytest.raises(PoolError, match=remedy):
            play("sqlite", folder, open_groups)
        assert (folder / "pool.db").read_bytes() == before


def test_a_folder_that_cannot_hold_a_pool_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PoolError, match="file"):
        play("sqlite", tmp_path / "file" / "run", open_groups)
    (tmp_path / "run" / "pool.db").mkdir(parents=True)
    with pytest.raises(PoolError, match="folder"):
        play("sqlite", tmp_path / "run", open_groups)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a pool with two complete groups."""

    async def write(pool: Pool) -> None:
        await complete(pool, 0, 1)

    folder = tmp_path_factory.mktemp("whole")
    play("sqlite", folder, write)
    return (folder / "pool.db").read_bytes()


def test_a_torn_file_gives_an_error_or_the_truth(whole: bytes, tmp_path: Path) -> None:
    async def read(pool: Pool) -> None:
        assert [group.rewards for group in await pool.groups("train")] == [[1.0, 1.0], [1.0, 1.0]]

    errors = 0
    for cut in range(512, len(whole), 8192 + 512):
        (tmp_path / "pool.db").write_bytes(whole[:cut])
        try:
            play("sqlite", tmp_path, read)
        except PoolError:
            errors += 1
    assert errors


def test_flipped_bits_never_give_a_wrong_token(whole: bytes, tmp_path: Path) -> None:
    true_steps = [make_step(rollout.id) for seq in (0, 1) for rollout in places(seq)]

    async def read(pool: Pool) -> None:
        for group in await pool.groups("train"):
            assert all(step in true_steps for attempt in group.rollouts for step in attempt.steps)

    errors, dice = 0, random.Random(7)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        (tmp_path / "pool.db").write_bytes(damaged)
        try:
            play("sqlite", tmp_path, read)
        except PoolError:
            errors += 1
    assert errors


def test_a_claim_looks_at_ready_groups_only(tmp_path: Path) -> None:
    play("sqlite", tmp_path, open_groups)
    with closing(sqlite3.connect(tmp_path / "pool.db")) as other:
        plan = "EXPLAIN QUERY PLAN SELECT id FROM groups WHERE channel = ? AND state = ? ORDER BY seq, id LIMIT ?"
        steps = [row[3] for row in other.execute(plan, ("train", "complete", 4))]
    assert steps == ["SEARCH groups USING COVERING INDEX groups_by_state (channel=? AND state=?)"]


def test_pool_of_every_earlier_format_is_brought_up_to_date(tmp_path: Path) -> None:
    """The file is as that format left it, with a group in it; nothing of it is lost, and it can do what is new."""
    for number in range(1, len(MIGRATIONS)):
        folder = tmp_path / str(number)
        make_old(folder, number)

        async def act(pool: Pool) -> None:
            assert [attempt.end for attempt in (await pool.groups("train"))[0].rollouts] == [End.COMPLETED]
            assert (await pool.stats()).steps == 1
            assert await pool.mark(Mark(rollout_id="train-0.0.1", note="old"))
            assert ids((await must_claim(pool)).groups) == ["train-0"]

        play("sqlite", folder, act)


def make_old(folder: Path, number: int) -> None:
    """A pool in an earlier format, with one complete group."""
    folder.mkdir()
    rollout, step, node = places(0, 1)[0], make_step("train-0.0.1"), make_node("train-0.0.1")
    task, row, step_row, node_row = (encode_row(record, "x") for record in (TASK, rollout, step, node))
    with closing(open_database(folder / "pool.db")) as database:
        for statement in [statement for change in MIGRATIONS[:number] for statement in change]:
            database.execute(statement)
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {number}")
        database.execute(
            "INSERT INTO groups (id, channel, seq, state, oldest, record, crc) VALUES ('train-0', 'train', 0, 'complete', 0, ?, ?)",
            (task.record, task.crc),
        )
        database.execute(
            """INSERT INTO rollouts (id, group_id, place, channel, current, ended, oldest, message, record, crc)
               VALUES (?, 'train-0', 0, 'train', 1, 'completed', 0, x'', ?, ?)""",
            (rollout.id, row.record, row.crc),
        )
        database.execute("INSERT INTO nodes VALUES (?, 0, ?, ?, ?)", (rollout.id, node_row.record, *node_row.columns, node_row.crc))
        database.execute(
            "INSERT INTO steps VALUES (?, 0, ?, ?, ?, ?, ?, ?)", (rollout.id, step_row.record, *step_row.columns, step_row.crc)
        )
        database.execute("INSERT INTO tally VALUES ('train', 'state', 'complete', 1), ('train', 'count', 'steps', 1)")


def test_write_waits_until_another_process_releases_file(tmp_path: Path) -> None:
    async def act(pool: Pool) -> None:
        await open_groups(pool)
        with closing(open_database(tmp_path / "pool.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = asyncio.ensure_future(pool.end("train-0.0.1", End.COMPLETED))
            assert not (await asyncio.wait({writing}, timeout=0.05))[0]
            other.execute("COMMIT")
            assert await writing

    play("sqlite", tmp_path, act)


def test_write_to_a_locked_file_fails_and_the_next_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pool.sqlite.BUSY_S", 0.02)

    async def act(pool: Pool) -> None:
        await open_groups(pool)
        with closing(open_database(tmp_path / "pool.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(PoolFailed, match="process"):
                await pool.end("train-0.0.1", End.COMPLETED)
            other.execute("COMMIT")
        assert (await pool.rollout("train-0.0.1")).end is None
        assert await pool.end("train-0.0.1", End.COMPLETED)

    play("sqlite", tmp_path, act)
