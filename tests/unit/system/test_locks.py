import asyncio
import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.system.files import FileLock, exclusive_lock, is_locked, lock_holder


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    with exclusive_lock(file, ConfigError("taken")):
        assert is_locked(file)
        with pytest.raises(ConfigError, match="taken"), exclusive_lock(file, ConfigError("taken")):
            pass
    assert not is_locked(file) and not is_locked(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_shared_locks_keep_an_exclusive_one_out(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    with FileLock(file) as other:
        with FileLock(file) as first:
            first.acquire(shared=True)
            with FileLock(file) as second:
                second.acquire(shared=True)
                assert not other.wait(0.05)
            assert not other.try_acquire()
        assert other.wait(5.0)


def test_waiting_ends_when_lock_is_free_or_at_deadline(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    with FileLock(file) as waiting:
        with FileLock(file) as held:
            held.acquire()
            assert not asyncio.run(waiting.wait_async(0.05))
        assert asyncio.run(waiting.wait_async(5.0))


def test_the_holder_is_known_by_its_process_id(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    assert lock_holder(file) is None
    with FileLock(file, mode=0o600) as lock:
        lock.acquire()
        assert lock_holder(file) == 0
        lock.write_holder()
        assert lock_holder(file) == os.getpid()
    assert lock_holder(file) is None
