from pathlib import Path

import pytest

from penstock.errors import PoolError
from penstock.pool.rows import PictureStore

RED, DIGEST = b"red", "b1f51a511f1da0cd348b8f8598db32e61cb963e5fc69e2b41485bf99590ed75a"


def test_a_picture_lies_once_under_its_digest(tmp_path: Path):
    store = PictureStore(tmp_path)
    assert store.put(RED) and store.put(RED)
    assert [file.name for file in (tmp_path / "pictures").iterdir()] == [DIGEST]
    assert (store.read(DIGEST), store.size_bytes()) == (RED, 3)


def test_full_store_takes_no_more_and_keeps_what_it_has(tmp_path: Path):
    store = PictureStore(tmp_path, max_bytes=3)
    assert store.put(RED) and not store.put(b"blue") and store.put(RED)


def test_damaged_missing_or_invalid_digest_is_rejected(tmp_path: Path):
    store = PictureStore(tmp_path)
    store.put(RED)
    store.path(DIGEST).write_bytes(b"blue")
    (tmp_path / "secret").write_text("s")
    for digest, reported in ((DIGEST, "damaged"), ("0" * 64, "is not in"), ("../secret", "digest")):
        with pytest.raises(PoolError, match=reported):
            store.read(digest)


def test_a_file_that_another_process_is_writing_may_vanish(tmp_path: Path):
    store = PictureStore(tmp_path)
    store.put(RED)
    (tmp_path / "pictures" / ".half-written").symlink_to("gone")  # it was there when the folder was listed, and no more
    assert store.put(b"blue") and store.size_bytes() == 7
