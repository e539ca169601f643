"""Authentication: the owner's token from the home folder, tokens of devices, and the device logins that create them.

Of device tokens only hashes are stored. A route's access level follows from its path; unlisted routes need a token.
"""

import hmac
import re
import secrets
import socket
import time
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.controller.api.bodies import read_object, reply, string_field
from penstock.controller.api.links import PATH, SignedLinks
from penstock.controller.database import ControllerDatabase
from penstock.controller.runs import new_id, now
from penstock.errors import ControllerError

TOKENS_TABLE = """CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL, created_at TEXT NOT NULL, expires_at TEXT NOT NULL,
    revoked INTEGER NOT NULL DEFAULT 0)"""
LOGINS_TABLE = """CREATE TABLE IF NOT EXISTS logins (
    device_hash TEXT PRIMARY KEY, user_code TEXT NOT NULL UNIQUE, name TEXT NOT NULL, until REAL NOT NULL, answer TEXT)"""
OWNER = "owner"
"""Token id and name of whoever has the token of the home folder."""
PUBLIC_PATHS = frozenset({"/health", "/device", "/api/cli/device/authorize", "/api/cli/device/token"})
OWNER_ROUTES = frozenset({("POST", "/api/cli/device/approve"), ("POST", "/api/cli/repositories")})
"""Routes that approve logins, or open folders of the controller's machine."""
TOKEN_LIFETIME = timedelta(days=90)
LOGIN_LIFETIME_S = 900
POLL_INTERVAL_S = 2
MAX_LOGINS = 50
"""Pending logins at once: anyone who reaches the controller can start one."""
CODE_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ23456789"
"""Of user codes: no characters that look alike, and no vowels, so that no words occur."""


class AccessLevel(StrEnum):
    """What a route requires of its caller."""

    NOTHING = "nothing"
    LINK = "link"
    TOKEN = "token"
    OWNER = "owner"


def required_access(method: str, path: str) -> AccessLevel:
    if path in PUBLIC_PATHS:
        return AccessLevel.NOTHING
    if path.startswith(f"{PATH}/"):
        return AccessLevel.LINK
    return AccessLevel.OWNER if (method, path) in OWNER_ROUTES else AccessLevel.TOKEN


class Identity(NamedTuple):
    token_id: str
    name: str
    expires_at: str | None = None

    @property
    def is_owner(self) -> bool:
        return self.token_id == OWNER

    @property
    def email(self) -> str:
        """A placeholder: clients expect one."""
        return f"{self.token_id}@{socket.gethostname() or 'localhost'}"


def require_owner(who: Identity) -> None:
    """Raises ControllerError 403 unless `who` is the owner."""
    if not who.is_owner:
        text = "this needs the owner's token, which lies in the controller's folder; run the command on the controller's machine"
        raise ControllerError(text, code="FORBIDDEN", status=403)


class ApiTokens:
    """The owner's token and the table of device tokens."""

    def __init__(self, database: ControllerDatabase, owner_token: str) -> None:
        self._database = database
        self._owner = _hash(owner_token)
        database.create(TOKENS_TABLE)

    def create(self, name: str) -> tuple[str, Identity]:
        """Creates a device token; only its hash is stored."""
        token, token_id = f"pst_{secrets.token_urlsafe(32)}", new_id()
        expires_at = (datetime.now(UTC) + TOKEN_LIFETIME).isoformat(timespec="seconds")
        statement = "INSERT INTO tokens (id, hash, name, created_at, expires_at) VALUES (?, ?, ?, ?, ?)"
        self._database.write(statement, [token_id, _hash(token), name, now(), expires_at])
        return token, Identity(token_id, name, expires_at)

    def identify(self, authorization: str | None) -> Identity:
        """Returns whose token an Authorization header has; ControllerError 401 with one of the platform's codes."""
        if authorization is None:
            raise _unauthorized("no token was sent; send it as `Authorization: Bearer …`", "AUTH_HEADER_MISSING")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _unauthorized("the Authorization header has no token; send it as `Authorization: Bearer …`", "TOKEN_MISSING")
        token_hash = _hash(token.strip())
        if hmac.compare_digest(token_hash, self._owner):
            return Identity(OWNER, OWNER)
        row = self._database.row("SELECT * FROM tokens WHERE hash = ?", [token_hash])
        if row is None:
            raise _unauthorized("the token is not one of this controller's; log in again", "TOKEN_INVALID")
        if row["revoked"]:
            raise _unauthorized("the token was revoked; log in again", "TOKEN_REVOKED")
        if datetime.fromisoformat(row["expires_at"]) < datetime.now(UTC):
            raise _unauthorized("the token is over; log in again", "TOKEN_EXPIRED")
        return Identity(row["id"], row["name"], row["expires_at"])

    def revoke(self, token_id: str, who: Identity) -> None:
        """Revokes a token: one's own, or as the owner any."""
        if token_id == OWNER:
            text = "the owner's token lies in the controller's folder; remove the file `token` there and start it again"
            raise ControllerError(text, code="TOKEN_PERMANENT", status=409)
        if not (who.is_owner or who.token_id == token_id):
            raise ControllerError("only the owner may revoke another's token", code="FORBIDDEN", status=403)
        if not self._database.write("UPDATE tokens SET revoked = 1 WHERE id = ?", [token_id]):
            raise ControllerError(f"there is no token {token_id!r}", code="TOKEN_NOT_FOUND", status=404)


class PendingLogin(NamedTuple):
    device_code: str
    user_code: str


class DeviceLogins:
    """The table of pending device logins."""

    def __init__(self, database: ControllerDatabase, tokens: ApiTokens) -> None:
        self._database = database
        self._tokens = tokens
        database.create(LOGINS_TABLE)

    def begin(self, name: str) -> PendingLogin:
        """Starts a login for a device of this name."""
        with self._database.transaction():
            self._database.write("DELETE FROM logins WHERE until < ?", [time.time()])
            waiting = self._database.rows("SELECT count(*) FROM logins")[0][0]
            if waiting >= MAX_LOGINS:
                raise ControllerError(f"{waiting} logins wait already; try again later", code="TOO_MANY_LOGINS", status=429)
            code = "".join(secrets.choice(CODE_ALPHABET) for _ in range(8))
            login = PendingLogin(secrets.token_urlsafe(32), f"{code[:4]}-{code[4:]}")
            statement = "INSERT INTO logins (device_hash, user_code, name, until) VALUES (?, ?, ?, ?)"
            self._database.write(statement, [_hash(login.device_code), login.user_code, name, time.time() + LOGIN_LIFETIME_S])
        return login

    def answer(self, user_code: str, *, approve: bool) -> str:
        """Approves or denies the login with this code, once; returns the device's name."""
        code = normalize_code(user_code)
        name = self._database.row("SELECT name FROM logins WHERE user_code = ?", [code])
        statement = "UPDATE logins SET answer = ? WHERE user_code = ? AND answer IS NULL AND until >= ?"
        changed = self._database.write(statement, ["approved" if approve else "denied", code, time.time()])
        if name is None or not changed:
            minutes = LOGIN_LIFETIME_S // 60
            text = f"no login waits with the code {code or user_code[:20]!r}; codes are good for {minutes} minutes, once"
            raise ControllerError(text, code="CODE_UNKNOWN", status=404)
        return name["name"]

    def token(self, device_code: str) -> tuple[str, Identity]:
        """Creates the token of an approved login, once; until then ControllerError with a code of the OAuth device flow."""
        device = _hash(device_code)
        with self._database.transaction():
            row = self._database.row("SELECT * FROM logins WHERE device_hash = ?", [device])
            if row is None or row["until"] < time.time():
                raise _login_state("expired_token")
            if row["answer"] == "denied":
                raise _login_state("access_denied")
            if row["answer"] is None:
                raise _login_state("authorization_pending")
            self._database.write("DELETE FROM logins WHERE device_hash = ?", [device])
            return self._tokens.create(row["name"])


class AccountRoutes:
    """Routes for logins and tokens."""

    def __init__(self, tokens: ApiTokens, logins: DeviceLogins, links: SignedLinks) -> None:
        self._tokens = tokens
        self._links = links
        self._logins = logins

    def routes(self) -> list[Route]:
        return [
            Route("/device", self._page, methods=["GET"]),
            Route("/api/cli/verify", self._verify, methods=["GET"]),
            Route("/api/cli/device/authorize", self._authorize, methods=["POST"]),
            Route("/api/cli/device/token", self._token, methods=["POST"]),
            Route("/api/cli/device/approve", self._approve, methods=["POST"]),
            Route("/api/cli/tokens/{token_id}", self._revoke, methods=["DELETE"]),
        ]

    async def _verify(self, request: Request) -> Response:
        who: Identity = request.state.who
        body = {"user": _user(who), "token_id": who.token_id}
        body |= {"expires_at": who.expires_at} if who.expires_at else {}
        git = request.headers.get("x-osmosis-git")
        role = "owner" if who.is_owner else "member"
        return reply(body | ({"workspace": {"id": git, "name": git, "role": role}} if git else {}))

    async def _authorize(self, request: Request) -> Response:
        body = await read_object(request)
        login = self._logins.begin(string_field(body, "deviceName", default="a device")[:100])
        page = f"{self._links.base}/device"
        uris = {"verification_uri": page, "verification_uri_complete": f"{page}?code={login.user_code}"}
        return reply(login._asdict() | uris | {"expires_in": LOGIN_LIFETIME_S, "interval": POLL_INTERVAL_S})

    async def _page(self, request: Request) -> Response:
        """Returns the page that the device's browser shows: how the owner approves the login."""
        code = normalize_code(request.query_params.get("code", "")) or "CODE"
        text = f"To let this device in, run on the controller's machine:\n\n    penstock controller approve {code}\n"
        return PlainTextResponse(text, headers={"cache-control": "no-store", "x-content-type-options": "nosniff"})

    async def _token(self, request: Request) -> Response:
        token, who = self._logins.token(string_field(await read_object(request), "device_code"))
        return reply({"token": token, "user": _user(who), "token_id": who.token_id, "expires_at": who.expires_at})

    async def _approve(self, request: Request) -> Response:
        body = await read_object(request)
        approve = body.get("deny") is not True
        name = self._logins.answer(string_field(body, "user_code"), approve=approve)
        return reply({"device_name": name, "status": "approved" if approve else "denied"})

    async def _revoke(self, request: Request) -> Response:
        self._tokens.revoke(request.path_params["token_id"], request.state.who)
        return reply({"id": request.path_params["token_id"], "status": "revoked"})


def normalize_code(text: str) -> str:
    """Returns a typed code in upper case with one dash."""
    letters = re.sub(r"[^A-Z0-9]", "", text.upper())[:8]
    return f"{letters[:4]}-{letters[4:]}" if letters else ""


def _user(who: Identity) -> dict[str, str]:
    return {"id": who.token_id, "email": who.email, "name": who.name}


def _hash(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _unauthorized(message: str, code: str) -> ControllerError:
    return ControllerError(message, code=code, status=401)


def _login_state(word: str) -> ControllerError:
    return ControllerError(word, code=word.upper(), status=400)
