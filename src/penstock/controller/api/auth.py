"""Who may ask for what: the owner's token from the controller's folder, and tokens of devices that the owner let in.

Only hashes of devices' tokens are kept. What a route needs follows from its path; one that is not named here needs a token.
"""

import hmac
import secrets
import socket
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from penstock.controller.api.links import PATH
from penstock.controller.database import Database
from penstock.controller.runs import new_id, now
from penstock.errors import ControllerError

TABLE = """CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL, created_at TEXT NOT NULL, expires_at TEXT NOT NULL,
    revoked INTEGER NOT NULL DEFAULT 0)"""
OWNER = "owner"
"""Id and name of who has the token of the folder."""
LIFETIME = timedelta(days=90)


class Needs(StrEnum):
    """What a route asks of its caller."""

    NOTHING = "nothing"
    LINK = "link"
    TOKEN = "token"
    OWNER = "owner"


OPEN = frozenset({"/health", "/device", "/api/cli/device/authorize", "/api/cli/device/token"})
OWNERS = frozenset({("POST", "/api/cli/device/approve"), ("POST", "/api/cli/repositories")})
"""What lets others in, or opens a folder of the controller's machine."""


def needs(method: str, path: str) -> Needs:
    """Of a route."""
    if path in OPEN:
        return Needs.NOTHING
    if path.startswith(f"{PATH}/"):
        return Needs.LINK
    return Needs.OWNER if (method, path) in OWNERS else Needs.TOKEN


class Identity(NamedTuple):
    """Who asks."""

    token_id: str
    name: str
    expires_at: str | None = None

    @property
    def is_owner(self) -> bool:
        """Whether it is the controller's own token."""
        return self.token_id == OWNER

    @property
    def email(self) -> str:
        """Clients want one; nothing is ever sent there."""
        return f"{self.token_id}@{socket.gethostname() or 'localhost'}"


class Tokens:
    """Those that open this controller."""

    def __init__(self, database: Database, owner_token: str) -> None:
        self._database = database
        self._owner = _hash(owner_token)
        database.create(TABLE)

    def make(self, name: str) -> tuple[str, Identity]:
        """A new one for a device; it can be read here and never again."""
        token, token_id = f"pst_{secrets.token_urlsafe(32)}", new_id()
        expires_at = (datetime.now(UTC) + LIFETIME).isoformat(timespec="seconds")
        statement = "INSERT INTO tokens (id, hash, name, created_at, expires_at) VALUES (?, ?, ?, ?, ?)"
        self._database.write(statement, [token_id, _hash(token), name, now(), expires_at])
        return token, Identity(token_id, name, expires_at)

    def identify(self, authorization: str | None) -> Identity:
        """Of a request with this header; ControllerError 401 with one of the platform's codes."""
        if authorization is None:
            raise _refused("no token was sent; send it as `Authorization: Bearer …`", "AUTH_HEADER_MISSING")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _refused("the Authorization header has no token; send it as `Authorization: Bearer …`", "TOKEN_MISSING")
        shown = _hash(token.strip())
        if hmac.compare_digest(shown, self._owner):
            return Identity(OWNER, OWNER)
        row = self._database.row("SELECT * FROM tokens WHERE hash = ?", [shown])
        if row is None:
            raise _refused("the token is not one of this controller's; log in again", "TOKEN_INVALID")
        if row["revoked"]:
            raise _refused("the token was revoked; log in again", "TOKEN_REVOKED")
        if datetime.fromisoformat(row["expires_at"]) < datetime.now(UTC):
            raise _refused("the token is over; log in again", "TOKEN_EXPIRED")
        return Identity(row["id"], row["name"], row["expires_at"])

    def revoke(self, token_id: str, who: Identity) -> None:
        """Make one worthless: one's own, or any by the owner."""
        if token_id == OWNER:
            text = "the owner's token lies in the controller's folder; remove the file `token` there and start it again"
            raise ControllerError(text, code="TOKEN_PERMANENT", status=409)
        if not (who.is_owner or who.token_id == token_id):
            raise ControllerError("only the owner may revoke another's token", code="FORBIDDEN", status=403)
        if not self._database.write("UPDATE tokens SET revoked = 1 WHERE id = ?", [token_id]):
            raise ControllerError(f"there is no token {token_id!r}", code="TOKEN_NOT_FOUND", status=404)


def refuse_others(who: Identity) -> None:
    """ControllerError 403 for all but the owner."""
    if not who.is_owner:
        text = "this needs the owner's token, which lies in the controller's folder; run the command on the controller's machine"
        raise ControllerError(text, code="FORBIDDEN", status=403)


def _hash(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _refused(message: str, code: str) -> ControllerError:
    return ControllerError(message, code=code, status=401)
