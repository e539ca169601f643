import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.system.files import KEY_BYTES, create_private, creating, load_key, publish, read_inside, replacing, write_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_write_replaces_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(b"old")
    assert write_file(file, b"new") == file
    assert file.read_bytes() == b"new" and names(tmp_path) == ["state.json"]


def test_content_is_synced_before_name_and_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigError, match="already"), creating(tmp_path / "out"):
        pass
    with pytest.raises(ConfigError, match="meanwhile"), creating(tmp_path / "late") as draft:
        draft.write_bytes(b"1")
        (tmp_path / "late").write_bytes(b"other")
    assert (tmp_path / "late").read_bytes() == b"other"


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "link").symlink_to(tmp_path / "nowhere")
    publish(tmp_path / "draft", tmp_path / "done")
    assert (tmp_path / "done" / "link").is_symlink()


KILLED_AT_A_CALL = """
import os, signal, sys
from pathlib import Path
from penstock.system.files import load_key

calls = 0
def kill(name):
    real = getattr(os, name)
    def call(*arguments, **named):
        global calls
        if str(sys.argv[1]) in str(arguments) or name in ("fsync", "link"):
            calls += 1
            if calls == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    setattr(os, name, call)

for name in ("open", "fsync", "link", "close", "unlink", "fdopen"):
    kill(name)
load_key(Path(sys.argv[1]) / "key", loss="start again")
print("whole")
"""


def test_kill_at_any_call_leaves_no_key_or_whole_one(tmp_path: Path) -> None:
    """Killed before its n-th system call on the file, for every n until it survives."""
    codes: list[int] = []
    for call in range(1, 40):
        folder = tmp_path / str(call)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", KILLED_AT_A_CALL, folder, str(call)], capture_output=True, timeout=60, check=False
        )
        assert not (folder / "key").exists() or len((folder / "key").read_bytes()) == KEY_BYTES
        key = load_key(folder / "key", loss="start again")
        assert load_key(folder / "key", loss="start again") == key and len(key) == KEY_BYTES
        codes.append(done.returncode)
        if done.returncode == 0:
            break
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0] and len(codes) > 5, "the kills have gone through the whole of it"


def test_key_is_synced_before_its_name_and_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def synced(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def linked(draft: Path, path: Path) -> None:
        calls.append("link")
        link(draft, path)

    monkeypatch.setattr(os, "fsync", synced)  # no seam: the order of system calls is the behaviour
    monkeypatch.setattr(os, "link", linked)
    load_key(tmp_path / "key", loss="start again")
    assert calls == ["file", "link", "folder"] and mode(tmp_path / "key") == 0o600
    load_key(tmp_path / "key", loss="start again")
    assert calls == ["file", "link", "folder"]


@pytest.mark.parametrize("content", [b"", b"k", b"k" * 31, b"\0" * 32, b"\0" * 64])
@pytest.mark.parametrize("text", [False, True])
def test_a_damaged_key_is_refused_with_a_remedy(tmp_path: Path, content: bytes, text: bool) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        load_key(tmp_path / "key", loss="start again", text=text)
    assert (tmp_path / "key").read_bytes() == content


def test_key_that_is_not_text_or_no_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff" * 43)
    with pytest.raises(ConfigError, match="key"):
        load_key(tmp_path / "key", loss="start again", text=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="directory"):
        load_key(tmp_path / "folder", loss="start again")


def test_a_file_is_opened_inside_its_folder_only(tmp_path: Path) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(b"inside")
    secret.write_bytes(b"outside")
    (folder / "link").symlink_to(secret)
    (folder / "inner").symlink_to("deep")
    os.mkfifo(folder / "pipe")
    assert read_inside(folder, folder / "deep" / "file") == b"inside"
    for name in ("link", "inner/file", "../secret", "deep", "pipe", "missing", "."):
        with pytest.raises(OSError):
            read_inside(folder, folder / name)
