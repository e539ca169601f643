import os
import stat
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.system.files import create_private, creating, publish, replacing, write_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_write_replaces_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(b"old")
    assert write_file(file, b"new") == file
    assert file.read_bytes() == b"new" and names(tmp_path) == ["state.json"]


def test_content_is_synced_before_the_name_and_the_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)  # no seam: the order of system calls is the behaviour
    monkeypatch.setattr(Path, "replace", renamed)
    write_file(tmp_path / "a", b"1")
    assert calls == ["file", "rename", "folder"]
    write_file(tmp_path / "b", b"1", durable=False)
    assert calls[3:] == ["rename"]


def test_private_files_are_for_the_owner_only(tmp_path: Path) -> None:
    assert mode(write_file(tmp_path / "tokens", b"1", private=True)) == 0o600
    create_private(tmp_path / "secret", b"first")
    create_private(tmp_path / "secret", b"second")
    assert (tmp_path / "secret").read_bytes() == b"first" and mode(tmp_path / "secret") == 0o600
    assert names(tmp_path) == ["secret", "tokens"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = write_file(tmp_path / "report", b"old")
    with pytest.raises(RuntimeError), replacing(file) as draft:
        draft.write_bytes(b"half")
        raise RuntimeError
    assert file.read_bytes() == b"old" and names(tmp_path) == ["report"]


def test_a_new_folder_appears_whole_and_never_over_another(tmp_path: Path) -> None:
    with creating(tmp_path / "out") as draft:
        draft.mkdir()
        (draft / "part").write_bytes(b"1")
        assert not (tmp_path / "out").exists()
    assert names(tmp_path / "out") == ["part"]
    with pytest.raises(ConfigError, match="is there already"), creating(tmp_path / "out"):
        pass
    with pytest.raises(ConfigError, match="came to be meanwhile"), creating(tmp_path / "late") as draft:
        draft.write_bytes(b"1")
        (tmp_path / "late").write_bytes(b"other")
    assert (tmp_path / "late").read_bytes() == b"other"


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "link").symlink_to(tmp_path / "nowhere")
    publish(tmp_path / "draft", tmp_path / "done")
    assert (tmp_path / "done" / "link").is_symlink()
