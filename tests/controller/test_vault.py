"""The vault: what is set comes back to runs alone, and nothing else shows it."""

import stat
from contextlib import contextmanager

import pytest

from penstock.errors import ConfigError, ControllerError
from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.identity import OWNER, THE_OWNER, Identity, device_identity
from penstock_controller.vault import SecretCipher, Vault, use_keyring, vault_key

KEY = b"k" * 32
VALUE = "s3cr3t value\nof two lines ü"
ANN, BOB = Identity("t1", "ann", person="ann"), Identity("t2", "bob", person="bob")
PHONE = device_identity("t3", "owner", "2099-01-01T00:00:00+00:00", "")
"""A device that calls itself like the owner."""


@contextmanager
def opened(folder, key=KEY):
    database = ControllerDatabase(folder / "c.db")
    try:
        yield Vault(database, key), database
    finally:
        database.close()


def test_a_persons_own_value_goes_before_the_workspaces(tmp_path):
    with opened(tmp_path) as (vault, _):
        vault.set("A", "mine", "user", who=THE_OWNER)
        vault.set("A", "ours", "workspace", who=THE_OWNER)
        vault.set("B", "ours too", "workspace", who=THE_OWNER)
        vault.set("C", "mine too", "user", who=THE_OWNER)
        assert vault.values(["A", "B", "C"], person=OWNER) == {"A": "mine", "B": "ours too", "C": "mine too"}
        assert vault.scopes(["A", "B", "C"], person=OWNER) == {"A": "user_override", "B": "workspace", "C": "user"}
        vault.delete("A", "user", who=THE_OWNER)
        assert vault.values(["A"], person=OWNER) == {"A": "ours"} and vault.scopes(["A"], person=OWNER) == {"A": "workspace"}


def test_a_value_is_replaced_and_keeps_its_id(tmp_path):
    with opened(tmp_path) as (vault, _):
        first = vault.set("A", "one", "workspace", who=ANN)
        second = vault.set("A", "two", "workspace", who=THE_OWNER)
        assert (first.id, second.creator, second.updater) == (second.id, "ann", "owner")
        assert vault.values(["A"], person=OWNER) == {"A": "two"} and vault.page(person=OWNER)[1] == 1


def test_no_file_of_the_controller_has_a_value(tmp_path):
    with opened(tmp_path) as (vault, database):
        vault.set("A", VALUE, "user", who=THE_OWNER)
        database.write("PRAGMA wal_checkpoint(TRUNCATE)")
        kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert b"s3cr3t" not in kept and b"A" in kept
        assert "s3cr3t" not in repr(vault.page(person=OWNER)) + repr(vars(vault))
    with opened(tmp_path) as (vault, _):
        assert vault.values(["A"], person=OWNER) == {"A": VALUE}


def test_missing_secrets_are_listed_together(tmp_path):
    with opened(tmp_path) as (vault, _):
        vault.set("B", "x", "user", who=THE_OWNER)
        for asked in (vault.values, vault.scopes):
            with pytest.raises(ControllerError) as refused:
                asked(["A", "B", "C", "A"], person=OWNER)
            assert (str(refused.value), refused.value.status) == ("Secret(s) not found: A, C", 404)
        assert vault.values([], person=OWNER) == {}


@pytest.mark.parametrize(
    ("name", "value", "scope", "field"),
    [
        ("lower", VALUE, "user", "name"),
        ("1A", VALUE, "user", "name"),
        ("A-B", VALUE, "user", "name"),
        ("A\n", VALUE, "user", "name"),
        ("A" * 256, VALUE, "user", "name"),
        ("A", "", "user", "value"),
        ("A", f"{VALUE}\0", "user", "value"),
        ("A", VALUE * 9999, "user", "value"),
        ("A", VALUE, "team", "scope"),
    ],
)
def test_what_cannot_be_a_secret_is_refused_without_its_value(tmp_path, name, value, scope, field):
    with opened(tmp_path) as (vault, _):
        with pytest.raises(ControllerError) as refused:
            vault.set(name, value, scope, who=THE_OWNER)
        assert (refused.value.status, refused.value.details) == (400, {"field": field})
        assert "s3cr3t" not in str(refused.value) and vault.page(person=OWNER)[1] == 0


def test_changed_or_moved_ciphertext_is_refused(tmp_path):
    with opened(tmp_path) as (vault, database):
        vault.set("A", VALUE, "user", who=THE_OWNER)
        vault.set("B", "other", "user", who=THE_OWNER)
        database.write("UPDATE secrets SET sealed = (SELECT sealed FROM secrets WHERE name = 'A') WHERE name = 'B'")
        with pytest.raises(ControllerError, match="again"):
            vault.values(["B"], person=OWNER)
    with opened(tmp_path, b"x" * 32) as (vault, _), pytest.raises(ControllerError, match="again") as refused:
        vault.values(["A"], person=OWNER)
    assert "s3cr3t" not in str(refused.value)


def test_every_bit_of_a_ciphertext_is_authenticated():
    cipher = SecretCipher(KEY)
    encrypted = cipher.encrypt(VALUE, "user", "A")
    assert encrypted != cipher.encrypt(VALUE, "user", "A") and cipher.decrypt(encrypted, "user", "A") == VALUE
    for place in range(len(encrypted)):
        changed = encrypted[:place] + bytes([encrypted[place] ^ 1]) + encrypted[place + 1 :]
        with pytest.raises(ControllerError):
            cipher.decrypt(changed, "user", "A")
    for cut in (b"", encrypted[:40], encrypted[:-1]):
        with pytest.raises(ControllerError):
            cipher.decrypt(cut, "user", "A")
    with pytest.raises(ControllerError):
        cipher.decrypt(encrypted, "use", "rA")  # the parts that it belongs to have lengths


def test_the_length_of_a_value_is_hidden_in_steps():
    cipher = SecretCipher(KEY)
    assert len(cipher.encrypt("x", "A")) == len(cipher.encrypt("x" * 50, "A")) < len(cipher.encrypt("x" * 100, "A"))


def test_the_key_is_made_once_for_its_owner_alone(tmp_path):
    home = Home(tmp_path / "home").create()
    key = vault_key(home)
    assert key == vault_key(home) and len(key) >= 32
    assert stat.S_IMODE((home.path / "vault.key").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="32"):
        SecretCipher(b"short")


KEYRING = """
import json, pathlib
FILE = pathlib.Path(__file__).with_name("ring.json")
def _all(): return json.loads(FILE.read_text()) if FILE.exists() else {}
def set_password(service, name, word): FILE.write_text(json.dumps(_all() | {service + name: word}))
def get_password(service, name): return _all().get(service + name)
"""


def test_the_key_moves_to_the_operating_systems_keyring(tmp_path, monkeypatch):
    home = Home(tmp_path / "home").create()
    key = vault_key(home)
    with pytest.raises(ConfigError, match="pip"):
        use_keyring(home)
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "keyring.py").write_text(KEYRING)
    monkeypatch.syspath_prepend(str(tmp_path / "ring"))
    monkeypatch.delitem(__import__("sys").modules, "keyring", raising=False)
    use_keyring(home)
    use_keyring(home)
    assert vault_key(home) == key and not (home.path / "vault.key").exists()
    (tmp_path / "ring" / "ring.json").unlink()
    with pytest.raises(ConfigError, match="unlock"):
        vault_key(home)
    monkeypatch.delitem(__import__("sys").modules, "keyring")


def test_a_persons_secrets_are_theirs_alone(tmp_path):
    people = (THE_OWNER, ANN, BOB, PHONE)
    with opened(tmp_path) as (vault, _):
        for who in people:
            vault.set("KEY", f"of {who.person}", "user", who=who)
        for who in people:
            assert vault.values(["KEY"], person=who.person) == {"KEY": f"of {who.person}"}
            assert [secret.creator for secret in vault.page(person=who.person)[0]] == [who.label]
        vault.delete("KEY", "user", who=PHONE)
        with pytest.raises(ControllerError) as refused:
            vault.delete("KEY", "user", who=PHONE)
        assert refused.value.status == 404
        with pytest.raises(ControllerError, match="KEY"):
            vault.values(["KEY"], person=PHONE.person)
        assert vault.values(["KEY"], person=OWNER) == {"KEY": "of owner"}


def test_two_devices_of_a_person_share_their_secrets(tmp_path):
    with opened(tmp_path) as (vault, _):
        vault.set("KEY", "one", "user", who=ANN)
        vault.set("KEY", "two", "user", who=ANN._replace(token_id="t9"))
        assert vault.values(["KEY"], person="ann") == {"KEY": "two"}


def test_shared_secret_belongs_to_its_creator_and_the_owner(tmp_path):
    with opened(tmp_path) as (vault, _):
        vault.set("KEY", "ann's", "workspace", who=ANN)
        for change in (lambda: vault.set("KEY", "bob's", "workspace", who=BOB), lambda: vault.delete("KEY", "workspace", who=BOB)):
            with pytest.raises(ControllerError, match="ann") as refused:
                change()
            assert refused.value.status == 403
        assert vault.values(["KEY"], person="bob") == {"KEY": "ann's"}
        vault.set("KEY", "ann's again", "workspace", who=ANN)
        vault.set("KEY", "the owner's", "workspace", who=THE_OWNER)
        with pytest.raises(ControllerError):
            vault.set("KEY", "ann's", "workspace", who=ANN)
        vault.delete("KEY", "workspace", who=THE_OWNER)
        assert vault.page(person="ann") == ([], 0)


@pytest.mark.parametrize("change", ["person = 'bob'", "person = 'owner'", "scope = 'workspace'"])
def test_secret_moved_to_another_person_is_refused(tmp_path, change):
    with opened(tmp_path) as (vault, database):
        vault.set("KEY", VALUE, "user", who=ANN)
        database.write(f"UPDATE secrets SET {change}")
        with pytest.raises(ControllerError, match="read"):
            vault.values(["KEY"], person="owner" if "owner" in change else "bob")


def test_secrets_of_a_table_without_persons_become_the_owners(tmp_path):
    with opened(tmp_path) as (vault, database):
        vault.set("KEY", "mine", "user", who=THE_OWNER)
        vault.set("KEY", "ours", "workspace", who=THE_OWNER)
        database.write("DROP INDEX secrets_by_name")
        database.write("ALTER TABLE secrets DROP COLUMN person")
    for _ in range(2):
        with opened(tmp_path) as (vault, _):
            assert vault.values(["KEY"], person=OWNER) == {"KEY": "mine"} and vault.page(person=OWNER)[1] == 2
            assert vault.values(["KEY"], person="ann") == {"KEY": "ours"} and vault.page(person="ann")[1] == 1
