"""The rollout server's journal: promises kept over restarts, results written once, a bound on what is kept."""

import asyncio
import sqlite3
import stat

import pytest

from penstock.errors import ConfigError
from penstock_compat.rollout_server.journal import open_journal
from penstock_compat.rollout_server.protocol import RolloutState


def with_journal(path, act, **options):
    async def main():
        journal = open_journal(path, **options)
        try:
            return await act(journal)
        finally:
            await journal.close()

    return asyncio.run(main())


async def accept(journal, *names):
    return [await journal.accept(name, f"digest of {name}", b"{}") for name in names]


def test_repeated_accept_is_recognized(tmp_path):
    async def act(journal):
        assert await accept(journal, "a", "a") == ["new", "same"]
        return await journal.accept("a", "another digest", b"{}")

    assert with_journal(tmp_path / "j.db", act) == "other"


def test_journal_keeps_accepted_rollouts_in_order(tmp_path):
    with_journal(tmp_path / "j.db", lambda journal: accept(journal, "b", "a", "c"))
    entries = with_journal(tmp_path / "j.db", lambda journal: journal.unsettled())
    assert [(entry.id, entry.request, entry.state) for entry in entries] == [(name, b"{}", RolloutState.QUEUED) for name in "bac"]


def test_result_is_written_once():
    async def act(journal):
        await accept(journal, "a")
        assert (await journal.start("a"), await journal.start("a")) == (True, False)
        assert await journal.complete("a", RolloutState.GRADING, "", b"first")
        assert not await journal.complete("a", RolloutState.FAILURE, "no", b"second")
        assert await journal.grade("a", RolloutState.SUCCESS, "", b"grade")
        assert not await journal.grade("a", RolloutState.FAILURE, "no", b"second")
        assert not await journal.end("a", RolloutState.CANCELLED, "no", b"third", b"third")
        entry = await journal.entry("a")
        assert (entry.state, entry.completion, entry.grade) == (RolloutState.SUCCESS, b"first", b"grade")

    with_journal(None, act)


def test_end_keeps_stored_results():
    async def act(journal):
        await accept(journal, "graded", "queued")
        await journal.start("graded")
        await journal.complete("graded", RolloutState.GRADING, "", b"done")
        for name in ("graded", "queued"):
            assert await journal.end(name, RolloutState.CANCELLED, "stop", b"cancelled", b"cancelled")
        assert not await journal.start("queued")
        assert not await journal.complete("queued", RolloutState.SUCCESS, "", b"too late")
        return [await journal.entry(name) for name in ("graded", "queued")]

    entries = with_journal(None, act)
    assert [(entry.completion, entry.grade) for entry in entries] == [(b"done", b"cancelled"), (b"cancelled", b"cancelled")]


def test_grade_without_a_completion_is_not_taken():
    async def act(journal):
        await accept(journal, "a")
        return await journal.grade("a", RolloutState.SUCCESS, "", b"grade")

    assert with_journal(None, act) is False


def test_settled_rollout_leaves_its_state_but_neither_keys_nor_results(tmp_path):
    async def act(journal):
        await journal.accept("a", "digest", b'{"llm_api_key": "SECRET-KEY"}')
        await journal.start("a")
        await journal.complete("a", RolloutState.SUCCESS, "", b"SECRET-RESULT")
        await journal.sent("a", "completion", "")
        await journal.settle("a")
        return await journal.unsettled(), await journal.status("a")

    unsettled, standing = with_journal(tmp_path / "j.db", act)
    assert (unsettled, standing) == ([], (RolloutState.SUCCESS, ""))
    assert not any(b"SECRET" in file.read_bytes() for file in tmp_path.iterdir())


def test_undelivered_result_stays_and_its_reason_is_reported():
    async def act(journal):
        await accept(journal, "late", "refused")
        for name in ("late", "refused"):
            await journal.complete(name, RolloutState.SUCCESS, "", b"done")
        await journal.settle("late", keep=True)
        await journal.sent("refused", "completion", "answered 404")
        await journal.settle("refused")
        return [entry.id for entry in await journal.unsettled()], await journal.status("refused")

    assert with_journal(None, act) == (["late"], (RolloutState.SUCCESS, "answered 404"))


def test_old_finished_rollouts_are_dropped():
    async def act(journal):
        await accept(journal, *map(str, range(10)))
        for n in range(1, 10):
            await journal.settle(str(n))
        return [str(n) for n in range(10) if (await journal.status(str(n))).state is not RolloutState.UNKNOWN]

    assert with_journal(None, act, max_settled=3) == ["0", "7", "8", "9"]


def test_journal_is_private_and_ignored_by_git(tmp_path):
    path = tmp_path / "new" / "j.db"
    with_journal(path, lambda journal: accept(journal, "a"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (path.parent / ".gitignore").read_text() == "*\n"


def test_journal_is_used_by_one_server_at_a_time(tmp_path):
    async def act(journal):
        with pytest.raises(ConfigError, match="rollout"):
            open_journal(tmp_path / "j.db")

    with_journal(tmp_path / "j.db", act)
    with_journal(tmp_path / "j.db", lambda journal: accept(journal, "a"))


def test_file_that_is_no_journal_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "text.db").write_text("not a database, whatever its name says" * 100)
    with pytest.raises(ConfigError, match="journal"):
        open_journal(tmp_path / "text.db")
    with sqlite3.connect(tmp_path / "later.db") as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(ConfigError, match="version"):
        open_journal(tmp_path / "later.db")
    with pytest.raises(ConfigError, match="journal"):
        open_journal(tmp_path / "text.db" / "below" / "j.db")


def test_half_a_character_in_a_message_is_no_trouble():
    async def act(journal):
        await accept(journal, "a")
        await journal.complete("a", RolloutState.FAILURE, "half \ud800", b"{}")
        return (await journal.status("a")).message

    assert with_journal(None, act) == "half ?"
