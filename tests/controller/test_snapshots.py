"""Code packed as it is, and unpacked into one folder whatever an archive holds."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from penstock.errors import ConfigError, ControllerError
from penstock_controller.snapshots import make_snapshot, snapshot_commit, unpack


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    return folder


def packed(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return sorted(tar.getnames())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = write(tmp_path / "repository", "main.py", "old.py", "deep/er.py")
    (folder / ".gitignore").write_text("*.log\ndata/\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_repository_is_packed_without_ignored_files(repository: Path) -> None:
    (repository / "old.py").unlink()
    write(repository, "new.py", "out.log", "data/rows.jsonl", "runs/one/events.jsonl", ".env", "__pycache__/a.pyc")
    with make_snapshot(repository) as snapshot:
        assert packed(snapshot.path) == [".gitignore", "deep/er.py", "main.py", "new.py"]
        assert (snapshot.files, snapshot.branch, snapshot.dirty) == (4, "main", True)
        assert snapshot.commit_sha == git(repository, "rev-parse", "HEAD")
    assert not snapshot.path.exists()
    with make_snapshot(repository, also=[repository / "data/rows.jsonl"]) as snapshot:
        assert "data/rows.jsonl" in packed(snapshot.path)
    with make_snapshot(repository / "deep") as snapshot:
        assert (packed(snapshot.path), snapshot.dirty) == (["er.py"], False)


def test_plain_folder_is_packed_without_hidden_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "plain", "main.py", "pkg/a.py", ".hidden", ".penstock/x", "env/pyvenv.cfg", "env/lib/b.py", "runs/r/x"
    )
    write(folder, "__pycache__/a.pyc", "pkg/runs/kept.py")
    with make_snapshot(folder) as snapshot:
        assert packed(snapshot.path) == ["main.py", "pkg/a.py", "pkg/runs/kept.py"]
        assert (snapshot.commit_sha, snapshot.branch, snapshot.dirty) == (None, None, False)


def test_archive_is_reproducible_and_unpacks_unchanged(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, "main.py", "run.sh") for name in ("one", "two"))
    for folder in (one, two):
        (folder / "run.sh").chmod(0o700)
        (folder / "link.py").symlink_to("main.py")
    with make_snapshot(one) as first, make_snapshot(two) as second:
        assert first.digest == second.digest
        unpack(first.path, tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "link.py").read_text() == "this is main.py" and (out / "link.py").is_symlink()
    assert (out / "run.sh").stat().st_mode & 0o777 == 0o755 and (out / "main.py").stat().st_mode & 0o777 == 0o644


def test_large_code_and_outside_links_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "plain", "main.py")
    with (folder / "big.bin").open("wb") as file:
        file.truncate(3_000_000)
    with pytest.raises(ConfigError, match=r"3 MB of files, and 2 MB may be submitted; the largest are big.bin \(3 MB\)"):
        make_snapshot(folder, limit_mb=2)
    (folder / "big.bin").unlink()
    (folder / "away").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="away"):
        make_snapshot(folder)


def test_commit_is_packed_and_unknown_commit_refused(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    write(repository, "later.py")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    with snapshot_commit(repository, first[:8]) as snapshot:
        assert "later.py" not in packed(snapshot.path) and snapshot.commit_sha == first and not snapshot.dirty
    with snapshot_commit(repository) as snapshot:
        assert "later.py" in packed(snapshot.path) and snapshot.branch == "main"
    for ref in ("nowhere", "--output=x", "main:main.py"):
        with pytest.raises(ControllerError) as refused:
            snapshot_commit(repository, ref)
        assert (refused.value.code, refused.value.status) == ("COMMIT_UNKNOWN", 404)


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(content) if kind == tarfile.REGTYPE else 0
    return member, content


def archive(tmp_path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(tmp_path / "sent.tar.gz", "w:gz") as tar:
        for member, content in entries:
            tar.addfile(member, io.BytesIO(content))
    return tmp_path / "sent.tar.gz"


LINK = tarfile.SYMTYPE
HOSTILE = {
    "parent": [entry("../evil")],
    "parent inside": [entry("a/../../evil")],
    "absolute": [entry("/tmp/evil")],
    "link out": [entry("away", LINK, "../..")],
    "link to root": [entry("away", LINK, "/etc")],
    "write through a link": [entry("here", LINK, "."), entry("here/evil")],
    "link by way of a link": [entry("here", LINK, "."), entry("up", LINK, "here/../..")],
    "link behind a link": [entry("here", LINK, "."), entry("here/up", LINK, "../x")],
    "circle": [entry("a", LINK, "b"), entry("b", LINK, "a")],
    "file over a link": [entry("a", LINK, "b"), entry("a")],
    "twice": [entry("a"), entry("a")],
    "file as folder": [entry("a"), entry("a/b")],
    "hard link": [entry("a"), entry("b", tarfile.LNKTYPE, "a")],
    "device": [entry("null", tarfile.CHRTYPE)],
    "pipe": [entry("pipe", tarfile.FIFOTYPE)],
    "too much": [entry("zeros", content=bytes(3_000_000))],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(ControllerError, match="snapshot") as refused:
        unpack(archive(tmp_path, *HOSTILE[name]), place / "code", limit_mb=2)
    assert (refused.value.code, refused.value.status) == ("SNAPSHOT_INVALID", 400)
    assert list(place.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "sent.tar.gz"]


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"\x1f\x8b\x08\x00cut off"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sent.tar.gz").write_bytes(content)
    with pytest.raises(ControllerError, match="whole"):
        unpack(tmp_path / "sent.tar.gz", tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_an_archive_cut_short_is_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path, entry("a", content=bytes(range(256)) * 4000)).read_bytes()
    (tmp_path / "sent.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ControllerError, match="whole"):
        unpack(tmp_path / "sent.tar.gz", tmp_path / "code")
