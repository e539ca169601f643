"""A controller's folder of an earlier version: its secrets are read and encrypted again, its runs and datasets are still there."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.errors import ControllerError
from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.identity import OWNER, THE_OWNER
from penstock_controller.vault import Vault, vault_key

USER = {"SEARCH_KEY": "old personal value", "JUDGE_KEY": "two lines\nand ünïcode", "LONG_KEY": "0123456789" * 30}
"""What a run gets: a personal value before one of the workspace."""


@contextmanager
def opened(home: Path, key: bytes | None = None) -> Generator[Vault]:
    with closing(ControllerDatabase(home / "controller.db")) as database:
        yield Vault(database, key or vault_key(Home(home)))


def stored(home: Path) -> dict[tuple[str, str], bytes]:
    with closing(sqlite3.connect(home / "controller.db")) as database:
        return {(name, scope): value for name, scope, value in database.execute("SELECT name, scope, sealed FROM secrets")}


def forms(home: Path) -> set[bytes]:
    return {value[:1] for value in stored(home).values()}


def test_old_secrets_are_read_and_encrypted_again_once(home):
    assert forms(home) == {b"\x01"}
    with opened(home) as vault:
        assert vault.values(USER, person=OWNER) == USER
        assert vault.scopes(USER, person=OWNER) == {"SEARCH_KEY": "user_override", "JUDGE_KEY": "workspace", "LONG_KEY": "user"}
    first = stored(home)
    assert forms(home) == {b"\x02"}
    with opened(home) as vault:
        assert vault.values(USER, person=OWNER) == USER and stored(home) == first
        vault.delete("SEARCH_KEY", "user", who=THE_OWNER)
        assert vault.values(["SEARCH_KEY"], person=OWNER) == {"SEARCH_KEY": "old workspace value"}


def test_with_another_key_old_secrets_stay_as_they_are(home):
    before = stored(home)
    with (
        opened(home, b"x" * 43) as vault,
        pytest.raises(ControllerError, match="LONG_KEY") as refused,
    ):
        vault.values(["LONG_KEY"], person=OWNER)
    assert refused.value.code == "VAULT_UNREADABLE" and stored(home) == before
    with opened(home) as vault:
        assert vault.values(USER, person=OWNER) == USER


def test_damaged_old_secret_is_rejected_and_others_are_read(home):
    with closing(sqlite3.connect(home / "controller.db")) as database, database:
        copied = "(SELECT sealed FROM secrets WHERE name = 'SEARCH_KEY' AND scope = 'workspace')"
        database.execute(f"UPDATE secrets SET sealed = {copied} WHERE name = 'SEARCH_KEY' AND scope = 'user'")
        database.execute("UPDATE secrets SET sealed = substr(sealed, 1, 20) WHERE name = 'LONG_KEY'")
    with opened(home) as vault:
        for name in ("SEARCH_KEY", "LONG_KEY"):
            with pytest.raises(ControllerError, match=f"{name}"):
                vault.values([name], person=OWNER)
            vault.set(name, "again", "user", who=THE_OWNER)
        assert vault.values(USER, person=OWNER) == {"SEARCH_KEY": "again", "JUDGE_KEY": USER["JUDGE_KEY"], "LONG_KEY": "again"}


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock_controller.database import ControllerDatabase
from penstock_controller.vault import vault_key
from penstock_controller.home import Home
from penstock_controller.vault import Vault

class DatabaseThatKills(ControllerDatabase):
    updates = 0
    def write(self, statement, values=()):
        changed = super().write(statement, values)
        self.updates += statement.startswith("UPDATE secrets")
        if self.updates == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return changed

home = Path(sys.argv[1])
Vault(DatabaseThatKills(home / "controller.db"), vault_key(Home(home)))
"""


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_kill_while_old_secrets_are_encrypted_again_loses_none(home, updates):
    died = subprocess.run([sys.executable, "-c", KILLED, str(home), str(updates)], timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL
    assert forms(home) == {b"\x01"}
    with opened(home) as vault:
        assert vault.values(USER, person=OWNER) == USER
    assert forms(home) == {b"\x02"}


@pytest.mark.slow
def test_a_controller_serves_an_old_folder(home, reported, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.delenv("PENSTOCK_CONTROLLER", raising=False)
    command = [sys.executable, "-m", "penstock", "controller", "up", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert json.loads(process.stdout.readline())["event"] == "ready"
            secrets = reported("secret", "list")["environment_secrets"]
            assert sorted({secret["name"] for secret in secrets}) == sorted(USER) and len(secrets) == 4
            dataset = reported("dataset", "list")["datasets"][0]
            assert (dataset["file_name"], dataset["row_count"], dataset["status"]) == ("tasks", 4, "uploaded")
            info = reported("eval", "info", "submitted")
            assert (info["eval_run"]["status"], info["results"]["graded"], info["results"]["passed"]) == ("finished", 2, 1)
            assert reported("eval", "download", "submitted", "--output", tmp_path / "fetched")["downloaded"] == 5
        finally:
            process.terminate()
    assert forms(home) == {b"\x02"}
