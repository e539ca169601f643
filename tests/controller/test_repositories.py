"""Repositories: a name stands for a folder on this machine, and what is under `rollouts/` there at a commit."""

import subprocess
from contextlib import contextmanager

import pytest

from penstock.errors import ControllerError
from penstock_controller.database import ControllerDatabase
from penstock_controller.repositories import Repositories


@contextmanager
def opened(folder):
    database = ControllerDatabase(folder / "c.db")
    try:
        yield Repositories(database)
    finally:
        database.close()


def git(folder, *arguments):
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def repository(folder, *rollouts):
    folder.mkdir()
    git(folder, "init", "-q")
    return commit(folder, *rollouts)


def commit(folder, *rollouts):
    for name in rollouts:
        (folder / "rollouts" / name).mkdir(parents=True)
        (folder / "rollouts" / name / "main.py").write_text("")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


def test_rollouts_are_those_of_the_commit_not_of_the_folder(tmp_path):
    sha = repository(tmp_path / "r", "sums", "chess")
    (tmp_path / "r" / "rollouts" / "draft").mkdir()
    (tmp_path / "r" / "rollouts" / "readme.md").write_text("")
    with opened(tmp_path) as repositories:
        assert repositories.register("Acme/Agents", tmp_path / "r").name == "acme/agents"
        found = repositories.rollouts("acme/agents")
        assert (found.names, found.commit_sha) == (["chess", "sums"], sha) and found.committed_at


def test_branch_has_separate_rollouts(tmp_path):
    repository(tmp_path / "r", "sums")
    git(tmp_path / "r", "checkout", "-q", "-b", "feature/x")
    sha = commit(tmp_path / "r", "more")
    git(tmp_path / "r", "checkout", "-q", "main")
    with opened(tmp_path) as repositories:
        repositories.register("a/b", tmp_path / "r")
        assert repositories.rollouts("a/b").names == ["sums"]
        found = repositories.rollouts("a/b", branch="feature/x")
        assert (found.names, found.commit_sha) == (["more", "sums"], sha)
        for unknown in ("none", "--output=x", "main:rollouts", "main^", "", "../main"):
            with pytest.raises(ControllerError, match="branch") as refused:
                repositories.rollouts("a/b", branch=unknown)
            assert refused.value.status == 404


def test_bare_empty_and_plain_folders_can_be_registered(tmp_path):
    repository(tmp_path / "r", "sums")
    git(tmp_path, "clone", "-q", "--bare", "r", "bare.git")
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    for name in ("rollouts/plain", "configs/eval", "configs/training", "data"):
        (tmp_path / "w" / name).mkdir(parents=True)
    with opened(tmp_path) as repositories:
        repositories.register("a/bare", tmp_path / "bare.git")
        repositories.register("a/empty", tmp_path / "empty")
        repositories.register("a/w", tmp_path / "w")
        assert repositories.rollouts("a/bare").names == ["sums"]
        assert repositories.rollouts("a/empty") == ([], None, None)
        assert repositories.rollouts("a/w") == (["plain"], None, None)
        assert [each.name for each in repositories.page()[0]] == ["a/w", "a/empty", "a/bare"]


def test_registered_name_can_move_and_unknown_has_a_remedy(tmp_path):
    repository(tmp_path / "one", "a")
    repository(tmp_path / "two", "b")
    with opened(tmp_path) as repositories:
        with pytest.raises(ControllerError, match="register") as unknown:
            repositories.get("a/b")
        assert (unknown.value.status, unknown.value.code) == (404, "REPOSITORY_UNKNOWN")
        repositories.register("a/b", tmp_path / "one")
        repositories.register("a/b", tmp_path / "two")
        assert repositories.get("A/B") == tmp_path / "two" and repositories.page()[1] == 1
        (tmp_path / "two").rename(tmp_path / "three")
        with pytest.raises(ControllerError, match="gone"):
            repositories.get("a/b")


@pytest.mark.parametrize("name", ["", "a", "a/b/c", "a/..", "../b", "a/b.", "-a/b", "a b/c", "a/b\n", "x" * 101 + "/b"])
def test_a_name_that_is_no_owner_and_name_is_refused(tmp_path, name):
    repository(tmp_path / "r")
    with opened(tmp_path) as repositories, pytest.raises(ControllerError, match="owner/name") as refused:
        repositories.register(name, tmp_path / "r")
    assert refused.value.status == 400


def test_a_folder_that_is_neither_is_refused(tmp_path):
    repository(tmp_path / "r", "sums")
    with opened(tmp_path) as repositories:
        for place in (tmp_path / "none", tmp_path, tmp_path / "r" / "rollouts", tmp_path / "c.db", tmp_path.relative_to("/")):
            with pytest.raises(ControllerError) as refused:
                repositories.register("a/b", place)
            assert (refused.value.status, refused.value.details) == (400, {"field": "path"})
        assert repositories.page() == ([], 0)
