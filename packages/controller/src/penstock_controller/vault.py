"""The vault: secrets by scope and name, encrypted in the database, and the key for them.

A secret is encrypted with AES-256-GCM of the `cryptography` library. The cipher's key is derived from the vault's key with
HKDF-SHA256; the nonce is 12 random bytes, new for each encryption. Scope and name are authenticated with the ciphertext: one
that was changed, or moved to another name, is refused. Texts are padded to a multiple of 64 bytes: only that length shows.

This protects secrets in a database, a backup or a log that others can read. It does not protect them from whoever can read the
key (a file of mode 0600 next to the database, or an entry in the operating system's keyring) or this process's memory.
"""

import hmac
import importlib
import re
import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256, shake_256
from typing import Any, Literal, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from penstock.errors import ConfigError, ControllerError
from penstock.system.files import check_key
from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.identity import OWNER, Identity
from penstock_controller.runs import new_id, now

VERSION, VERSION_1 = b"\x02", b"\x01"
"""First byte of a ciphertext: of `SecretCipher`, and of the older format that `decrypt_version_1` reads."""
NONCE_BYTES, TAG_BYTES, PADDING_BYTES = 12, 16, 64
KEY_FILE, KEYRING_MARKER = "vault.key", "vault.keyring"
KEYRING_SERVICE = "penstock controller"


def vault_key(home: Home) -> bytes:
    """Returns the vault's key: from the keyring if `use_keyring` moved it there, else from its file; generated on first use."""
    if not (home.path / KEYRING_MARKER).exists():
        return home.key(KEY_FILE)
    stored = _keyring().get_password(KEYRING_SERVICE, str(home.path.resolve()))
    if not stored:
        text = f"the key of the secrets in {home.path} is in the operating system's keyring, which does not give it out"
        raise ConfigError(f"{text}; unlock the keyring, or remove {home.path / KEYRING_MARKER} and set all secrets again")
    return stored.encode()


def use_keyring(home: Home) -> None:
    """Moves the key from its file to the operating system's keyring; ConfigError if the keyring does not store it."""
    key, ring, name = vault_key(home).decode(), _keyring(), str(home.path.resolve())
    try:
        ring.set_password(KEYRING_SERVICE, name, key)
        stored = ring.get_password(KEYRING_SERVICE, name)
    except Exception as cause:
        raise ConfigError(f"the operating system's keyring refused the key: {cause}; the key stays in its file") from cause
    if stored != key:
        raise ConfigError("the operating system's keyring did not keep the key; it stays in its file")
    (home.path / KEYRING_MARKER).touch(mode=0o600)  # before the file is removed: a kill in between must not lose the key
    with suppress(FileNotFoundError):
        (home.path / KEY_FILE).unlink()


def _keyring() -> Any:
    try:
        return importlib.import_module("keyring")
    except ImportError as cause:
        raise ConfigError("the operating system's keyring needs a package: pip install keyring") from cause


class SecretCipher:
    """Encrypts texts. `context` (scope and name) is authenticated, and must be the same for decryption."""

    def __init__(self, key: bytes) -> None:
        check_key(key, "the vault's key is damaged", "put it back from a backup, or set all secrets again with a new one")
        self._aead = AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=b"penstock vault: AES-256-GCM").derive(key))

    def __repr__(self) -> str:
        return "SecretCipher(…)"

    def encrypt(self, text: str, *context: str) -> bytes:
        """Returns the version, the nonce, and the ciphertext with its tag."""
        plain = text.encode("utf-8", "surrogatepass")
        padded = len(plain).to_bytes(8, "big") + plain
        padded += bytes(-len(padded) % PADDING_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        return VERSION + nonce + self._aead.encrypt(nonce, padded, _framed(VERSION, *(part.encode() for part in context)))

    def decrypt(self, encrypted: bytes, *context: str) -> str:
        """Returns the text; ControllerError if it was not encrypted with this key and `context`."""
        version, nonce, ciphertext = encrypted[:1], encrypted[1 : 1 + NONCE_BYTES], encrypted[1 + NONCE_BYTES :]
        if version != VERSION or len(ciphertext) < TAG_BYTES:
            raise _unreadable(context)
        try:
            padded = self._aead.decrypt(nonce, ciphertext, _framed(VERSION, *(part.encode() for part in context)))
        except InvalidTag:
            raise _unreadable(context) from None
        return _unpadded(padded)


def decrypt_version_1(key: bytes, encrypted: bytes, *context: str) -> str:
    """Decrypts the version 1 format, which is no longer written; ControllerError if that fails.

    Version, nonce of 32 bytes, padded text XOR a SHAKE-256 keystream, HMAC-SHA256 tag of 32 bytes.
    """
    nonce, hidden, tag = encrypted[1:33], encrypted[33:-32], encrypted[-32:]
    hiding = hmac.digest(key, b"penstock vault: hiding", sha256)
    signing = hmac.digest(key, b"penstock vault: signing", sha256)
    signed = _framed(VERSION_1, nonce, *(part.encode() for part in context), hidden)
    if encrypted[:1] != VERSION_1 or not hmac.compare_digest(tag, hmac.digest(signing, signed, sha256)):
        raise _unreadable(context)
    stream = shake_256(b"penstock vault" + hiding + nonce).digest(len(hidden))
    return _unpadded(bytes(a ^ b for a, b in zip(hidden, stream, strict=True)))


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _unpadded(padded: bytes) -> str:
    return padded[8 : 8 + int.from_bytes(padded[:8], "big")].decode("utf-8", "surrogatepass")


def _unreadable(context: tuple[str, ...]) -> ControllerError:
    text = f"the secret {' '.join(context)} cannot be read with this controller's key; set it again"
    return ControllerError(text, code="VAULT_UNREADABLE", status=500)


TABLE = """CREATE TABLE IF NOT EXISTS secrets (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, scope TEXT NOT NULL, person TEXT NOT NULL,
    sealed BLOB NOT NULL, created_at TEXT NOT NULL, updated_at TEXT NOT NULL, creator TEXT NOT NULL, updater TEXT NOT NULL)"""
INDEX = (
    "CREATE UNIQUE INDEX IF NOT EXISTS secrets_by_name ON secrets (name, scope, (CASE scope WHEN 'user' THEN person ELSE '' END))"
)
COLUMNS = "seq, id, name, scope, sealed, created_at, updated_at, creator, updater"
"""The columns of the table that an older version made, which had no `person`."""
NAME = re.compile(r"[A-Z][A-Z0-9_]*")
LONGEST_NAME, LARGEST_VALUE = 255, 65_536
"""In characters; bounded by what a process environment can hold."""
Scope = Literal["user", "workspace"]
SCOPES: tuple[Scope, ...] = ("user", "workspace")
VISIBLE = "(scope = 'workspace' OR person = ?)"
"""Condition for the secrets that a person may see and use."""


class Secret(NamedTuple):
    """A secret without its value."""

    id: str
    name: str
    scope: Scope
    created_at: str
    updated_at: str
    creator: str
    updater: str


class Vault:
    """The table of secrets, encrypted with `key`. Only `values` returns plaintext; errors never contain it.

    `person` is whoever asks: they see and use their own secrets and the shared ones.
    """

    def __init__(self, database: ControllerDatabase, key: bytes) -> None:
        self._database = database
        self._cipher = SecretCipher(key)
        self._create_table()
        self._reencrypt_version_1(key)

    def set(self, name: str, value: str, scope: str, *, who: Identity) -> Secret:
        """Stores a value, replacing an earlier one; ControllerError 400 if an argument is invalid, 403 if it is another's."""
        _check(name, value, scope)
        moment = now()
        with self._database.transaction():
            known = self._find_own(name, scope, who)
            row = [self._encrypt(value, scope, name, who.person), moment, who.label, who.person]
            if known is None:
                statement = """INSERT INTO secrets (sealed, updated_at, updater, person, id, name, scope, created_at, creator)
                    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
                self._database.write(statement, [*row, new_id(), name, scope, moment, who.label])
            else:  # the owner who replaces a shared secret takes it over
                statement = "UPDATE secrets SET sealed = ?, updated_at = ?, updater = ?, person = ? WHERE seq = ?"
                self._database.write(statement, [*row, known["seq"]])
            found = self._find_own(name, scope, who)
        assert found is not None, "it was written"
        return _secret(found)

    def page(self, scope: str = "all", *, person: str, limit: int = 50, offset: int = 0) -> tuple[list[Secret], int]:
        """Returns a page of the person's and the shared secrets, sorted by name, and the total count."""
        scopes: tuple[str, ...] = SCOPES if scope == "all" else (check_scope(scope),)
        where = f"scope IN ({_placeholders(scopes)}) AND {VISIBLE}"
        statement = f"SELECT * FROM secrets WHERE {where} ORDER BY name, scope LIMIT ? OFFSET ?"
        found = self._database.rows(statement, [*scopes, person, limit, offset])
        total = self._database.rows(f"SELECT count(*) FROM secrets WHERE {where}", [*scopes, person])[0][0]
        return [_secret(row) for row in found], total

    def delete(self, name: str, scope: str, *, who: Identity) -> None:
        """Deletes a secret; ControllerError 404 if there is none, 403 if it is another's."""
        with self._database.transaction():
            known = self._find_own(name, check_scope(scope), who)
            if known is None:
                text = f"there is no secret {name[:LONGEST_NAME]!r} in scope {scope}; see: penstock secret list"
                raise ControllerError(text, code="SECRET_NOT_FOUND", status=404)
            self._database.write("DELETE FROM secrets WHERE seq = ?", [known["seq"]])

    def scopes(self, names: Iterable[str], *, person: str) -> dict[str, str]:
        """Returns the scope of each name: `user`, `workspace`, or `user_override` if both scopes have one."""
        words: dict[frozenset[str], str] = {
            frozenset({"user"}): "user",
            frozenset({"workspace"}): "workspace",
            frozenset(SCOPES): "user_override",
        }
        return {name: words[frozenset(row["scope"] for row in rows)] for name, rows in self._find(names, person).items()}

    def values(self, names: Iterable[str], *, person: str) -> dict[str, str]:
        """Returns the plaintext of each name, the person's own before a shared one; ControllerError 404 if one is missing."""
        found = self._find(names, person)
        chosen = {name: min(rows, key=lambda row: SCOPES.index(row["scope"])) for name, rows in found.items()}
        return {
            name: self._cipher.decrypt(row["sealed"], *_context(row["scope"], name, row["person"])) for name, row in chosen.items()
        }

    def _encrypt(self, value: str, scope: str, name: str, person: str) -> bytes:
        return self._cipher.encrypt(value, *_context(scope, name, person))

    def _create_table(self) -> None:
        """Creates the table. In one of an older version every secret becomes the owner's: nobody knows who had set it."""
        with self._database.transaction():
            columns = {row["name"] for row in self._database.rows("PRAGMA table_info(secrets)")}
            if columns and "person" not in columns:  # rebuilt, since its rows are unique without a person
                self._database.write("ALTER TABLE secrets RENAME TO secrets_without_person")
                self._database.write(TABLE)
                moved = f"INSERT INTO secrets ({COLUMNS}, person) SELECT {COLUMNS}, ? FROM secrets_without_person"
                self._database.write(moved, [OWNER])
                self._database.write("DROP TABLE secrets_without_person")
            self._database.write(TABLE)
            self._database.write(INDEX)

    def _reencrypt_version_1(self, key: bytes) -> None:
        """Encrypts secrets of version 1 again, in one transaction; one that `key` cannot decrypt stays, and `values` refuses it."""
        with self._database.transaction():
            for row in self._database.rows("SELECT * FROM secrets WHERE substr(sealed, 1, 1) = ?", [VERSION_1]):
                scope, name = row["scope"], row["name"]
                try:
                    value = decrypt_version_1(key, row["sealed"], scope, name)
                except ControllerError:
                    continue
                encrypted = self._encrypt(value, scope, name, row["person"])
                self._database.write("UPDATE secrets SET sealed = ? WHERE seq = ?", [encrypted, row["seq"]])

    def _find_own(self, name: str, scope: str, who: Identity) -> sqlite3.Row | None:
        """Returns the row that `who` may change; None if there is none, ControllerError 403 if it is shared by another."""
        row = self._database.row(f"SELECT * FROM secrets WHERE name = ? AND scope = ? AND {VISIBLE}", [name, scope, who.person])
        if row is not None and not who.may_change(row["person"]):
            text = f"the shared secret {name} is {row['updater'] or 'another'}'s; they or the controller's owner may change it"
            raise ControllerError(f"{text}; set one of your own with --scope personal", code="FORBIDDEN", status=403)
        return row

    def _find(self, names: Iterable[str], person: str) -> dict[str, list[sqlite3.Row]]:
        unique = list(dict.fromkeys(names))
        statement = f"SELECT * FROM secrets WHERE name IN ({_placeholders(unique)}) AND {VISIBLE}"
        found = self._database.rows(statement, [*unique, person]) if unique else []
        rows = {name: [row for row in found if row["name"] == name] for name in unique}
        if missing := [name[:LONGEST_NAME] for name in unique if not rows[name]]:
            raise ControllerError(f"Secret(s) not found: {', '.join(missing)}", code="SECRET_NOT_FOUND", status=404)
        return rows


def check_scope(scope: str) -> Scope:
    if scope not in SCOPES:
        raise _invalid_secret(f"scope {scope[:40]!r} is neither user nor workspace", "scope")
    return scope


def check_name(name: str) -> None:
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        rule = f"begin with a capital letter and use A-Z, 0-9 and _ only, at most {LONGEST_NAME} characters"
        raise _invalid_secret(f"secret name {name[:80]!r}: {rule}", "name")


def _check(name: str, value: str, scope: str) -> None:
    check_scope(scope)
    check_name(name)
    if not value:
        raise _invalid_secret(f"secret {name}: its value is empty; give one, or delete the secret", "value")
    if len(value) > LARGEST_VALUE:
        raise _invalid_secret(f"secret {name}: its value is longer than {LARGEST_VALUE} characters", "value")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _invalid_secret(f"secret {name}: its value has a character that no environment variable can hold", "value")


def _invalid_secret(message: str, field: str) -> ControllerError:
    return ControllerError(message, code="SECRET_INVALID", status=400, details={"field": field})


def _placeholders(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _context(scope: str, name: str, person: str) -> tuple[str, ...]:
    """What a ciphertext is bound to. The owner's and shared ones are bound to no person, as in older versions."""
    return (scope, name) if person == OWNER or scope == "workspace" else (scope, name, person)


def _secret(row: sqlite3.Row) -> Secret:
    return Secret(*(row[field] for field in Secret._fields))
