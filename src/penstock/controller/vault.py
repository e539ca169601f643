"""Secrets by name, in two scopes: `user` and `workspace`. Values are stored encrypted and only given to runs that name them."""

import re
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from penstock.controller.database import ControllerDatabase
from penstock.controller.encryption import VERSION_1, SecretCipher, decrypt_version_1
from penstock.controller.runs import new_id, now
from penstock.errors import ControllerError

TABLE = """CREATE TABLE IF NOT EXISTS secrets (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, scope TEXT NOT NULL, sealed BLOB NOT NULL,
    created_at TEXT NOT NULL, updated_at TEXT NOT NULL, creator TEXT NOT NULL, updater TEXT NOT NULL, UNIQUE (name, scope))"""
NAME = re.compile(r"[A-Z][A-Z0-9_]*")
LONGEST_NAME, LARGEST_VALUE = 255, 65_536
"""In characters; bounded by what a process environment can hold."""
Scope = Literal["user", "workspace"]
SCOPES: tuple[Scope, ...] = ("user", "workspace")


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
    """The table of secrets, encrypted with `key`. Only `values` returns plaintext; errors never contain it."""

    def __init__(self, database: ControllerDatabase, key: bytes) -> None:
        self._database = database
        self._cipher = SecretCipher(key)
        database.create(TABLE)
        self._reencrypt_version_1(key)

    def set(self, name: str, value: str, scope: str, *, by: str = "") -> Secret:
        """Stores a value, replacing an earlier one; ControllerError 400 if name, value or scope is invalid."""
        _check(name, value, scope)
        moment = now()
        self._database.write(
            """INSERT INTO secrets (id, name, scope, sealed, created_at, updated_at, creator, updater)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?)
            ON CONFLICT (name, scope) DO UPDATE SET sealed = excluded.sealed, updated_at = excluded.updated_at,
            updater = excluded.updater""",
            [new_id(), name, scope, self._cipher.encrypt(value, scope, name), moment, moment, by, by],
        )
        found = self._database.row("SELECT * FROM secrets WHERE name = ? AND scope = ?", [name, scope])
        assert found is not None, "it was written"
        return _secret(found)

    def page(self, scope: str = "all", *, limit: int = 50, offset: int = 0) -> tuple[list[Secret], int]:
        """Returns a page of secrets, sorted by name, and the total count."""
        scopes: tuple[str, ...] = SCOPES if scope == "all" else (check_scope(scope),)
        where = f"scope IN ({_placeholders(scopes)})"
        statement = f"SELECT * FROM secrets WHERE {where} ORDER BY name, scope LIMIT ? OFFSET ?"
        found = self._database.rows(statement, [*scopes, limit, offset])
        total = self._database.rows(f"SELECT count(*) FROM secrets WHERE {where}", scopes)[0][0]
        return [_secret(row) for row in found], total

    def delete(self, name: str, scope: str) -> None:
        """Deletes a secret; ControllerError 404 if there is none."""
        if not self._database.write("DELETE FROM secrets WHERE name = ? AND scope = ?", [name, check_scope(scope)]):
            text = f"there is no secret {name[:LONGEST_NAME]!r} in scope {scope}; see: penstock secret list"
            raise ControllerError(text, code="SECRET_NOT_FOUND", status=404)

    def scopes(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the scope of each name: `user`, `workspace`, or `user_override` if both scopes have one."""
        words: dict[frozenset[str], str] = {
            frozenset({"user"}): "user",
            frozenset({"workspace"}): "workspace",
            frozenset(SCOPES): "user_override",
        }
        return {name: words[frozenset(row["scope"] for row in rows)] for name, rows in self._find(names).items()}

    def values(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the plaintext of each name, `user` before `workspace`; ControllerError 404 if one is missing."""
        chosen = {name: min(rows, key=lambda row: SCOPES.index(row["scope"])) for name, rows in self._find(names).items()}
        return {name: self._cipher.decrypt(row["sealed"], row["scope"], name) for name, row in chosen.items()}

    def _reencrypt_version_1(self, key: bytes) -> None:
        """Encrypts secrets of version 1 anew, in one transaction; one that `key` cannot decrypt stays, and `values` refuses it."""
        with self._database.transaction():
            for row in self._database.rows("SELECT * FROM secrets WHERE substr(sealed, 1, 1) = ?", [VERSION_1]):
                scope, name = row["scope"], row["name"]
                try:
                    value = decrypt_version_1(key, row["sealed"], scope, name)
                except ControllerError:
                    continue
                encrypted = self._cipher.encrypt(value, scope, name)
                self._database.write("UPDATE secrets SET sealed = ? WHERE seq = ?", [encrypted, row["seq"]])

    def _find(self, names: Iterable[str]) -> dict[str, list[sqlite3.Row]]:
        unique = list(dict.fromkeys(names))
        found = self._database.rows(f"SELECT * FROM secrets WHERE name IN ({_placeholders(unique)})", unique) if unique else []
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


def _secret(row: sqlite3.Row) -> Secret:
    return Secret(*(row[field] for field in Secret._fields))
