"""Logins of devices: a device shows a short code, the owner approves it on the controller's machine, the device gets a token."""

import re
import secrets
import time
from hashlib import sha256
from typing import NamedTuple

from penstock.controller.api.auth import Identity, Tokens
from penstock.controller.database import Database
from penstock.errors import ControllerError

TABLE = """CREATE TABLE IF NOT EXISTS logins (
    device_hash TEXT PRIMARY KEY, user_code TEXT NOT NULL UNIQUE, name TEXT NOT NULL, until REAL NOT NULL, answer TEXT)"""
LETTERS = "BCDFGHJKLMNPQRSTVWXZ23456789"
"""Of a user's code: none that is taken for another, none that makes words."""
LIFETIME_S = 900
INTERVAL_S = 2
MOST = 50
"""Logins that wait at once: anyone who reaches the controller may begin one."""


class Begun(NamedTuple):
    """A login that waits."""

    device_code: str
    user_code: str


class Logins:
    """Those that wait. They are few and short-lived, and survive a controller that is started again."""

    def __init__(self, database: Database, tokens: Tokens) -> None:
        self._database = database
        self._tokens = tokens
        database.create(TABLE)

    def begin(self, name: str) -> Begun:
        """For a device of this name."""
        with self._database.transaction():
            self._database.write("DELETE FROM logins WHERE until < ?", [time.time()])
            waiting = self._database.rows("SELECT count(*) FROM logins")[0][0]
            if waiting >= MOST:
                raise ControllerError(f"{waiting} logins wait already; try again later", code="TOO_MANY_LOGINS", status=429)
            code = "".join(secrets.choice(LETTERS) for _ in range(8))
            begun = Begun(secrets.token_urlsafe(32), f"{code[:4]}-{code[4:]}")
            statement = "INSERT INTO logins (device_hash, user_code, name, until) VALUES (?, ?, ?, ?)"
            self._database.write(statement, [_hash(begun.device_code), begun.user_code, name, time.time() + LIFETIME_S])
        return begun

    def answer(self, user_code: str, *, approve: bool) -> str:
        """Let the device in that shows this code, or not; its name. A code is answered once."""
        code = as_code(user_code)
        name = self._database.row("SELECT name FROM logins WHERE user_code = ?", [code])
        statement = "UPDATE logins SET answer = ? WHERE user_code = ? AND answer IS NULL AND until >= ?"
        changed = self._database.write(statement, ["approved" if approve else "denied", code, time.time()])
        if name is None or not changed:
            text = f"no login waits with the code {code or user_code[:20]!r}; codes are good for {LIFETIME_S // 60} minutes, once"
            raise ControllerError(text, code="CODE_UNKNOWN", status=404)
        return name["name"]

    def token(self, device_code: str) -> tuple[str, Identity]:
        """For a device that was let in, once; until then, ControllerError with the platform's word for how it stands."""
        device = _hash(device_code)
        with self._database.transaction():
            row = self._database.row("SELECT * FROM logins WHERE device_hash = ?", [device])
            if row is None or row["until"] < time.time():
                raise _stands("expired_token")
            if row["answer"] == "denied":
                raise _stands("access_denied")
            if row["answer"] is None:
                raise _stands("authorization_pending")
            self._database.write("DELETE FROM logins WHERE device_hash = ?", [device])
            return self._tokens.make(row["name"])


def as_code(text: str) -> str:
    """As it was shown, however it was typed: upper case, one dash."""
    letters = re.sub(r"[^A-Z0-9]", "", text.upper())[:8]
    return f"{letters[:4]}-{letters[4:]}" if letters else ""


def _stands(word: str) -> ControllerError:
    return ControllerError(word, code=word.upper(), status=400)


def _hash(code: str) -> str:
    return sha256(code.encode("utf-8", "surrogatepass")).hexdigest()
