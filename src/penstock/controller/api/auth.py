"""Who may ask for what: the owner's token from the controller's folder, and tokens of devices that the owner let in.

Only hashes of devices' tokens are kept. What a route needs follows from its path; one that is not named here needs a token.
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
OWNER = "owner"
"""Id and name of who has the token of the folder."""
TOKEN_LIFETIME = timedelta(days=90)


class AccessLevel(StrEnum):
    """What a route asks of its caller."""

    NOTHING = "nothing"
    LINK = "link"
    TOKEN = "token"
    OWNER = "owner"


PUBLIC_PATHS = frozenset({"/health", "/device", "/api/cli/device/authorize", "/api/cli/device/token"})
OWNER_ROUTES = frozenset({("POST", "/api/cli/device/approve"), ("POST", "/api/cli/repositories")})
"""What lets others in, or opens a folder of the controller's machine."""


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
        """Whether it is the controller's own token."""
        return self.token_id == OWNER

    @property
    def email(self) -> str:
        """Clients want one; nothing is ever sent there."""
        return f"{self.token_id}@{socket.gethostname() or 'localhost'}"


class ApiTokens:
    """Those that open this controller."""

    def __init__(self, database: ControllerDatabase, owner_token: str) -> None:
        self._database = database
        self._owner = _hash(owner_token)
        database.create(TOKENS_TABLE)

    def make(self, name: str) -> tuple[str, Identity]:
        """A new one for a device; it can be read here and never again."""
        token, token_id = f"pst_{secrets.token_urlsafe(32)}", new_id()
        expires_at = (datetime.now(UTC) + TOKEN_LIFETIME).isoformat(timespec="seconds")
        statement = "INSERT INTO tokens (id, hash, name, created_at, expires_at) VALUES (?, ?, ?, ?, ?)"
        self._database.write(statement, [token_id, _hash(token), name, now(), expires_at])
        return token, Identity(token_id, name, expires_at)

    def identify(self, authorization: str | None) -> Identity:
        """Of a request with this header; ControllerError 401 with one of the platform's codes."""
        if authorization is None:
            raise _unauthorized("no token was sent; send it as `Authorization: Bearer …`", "AUTH_HEADER_MISSING")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _unauthorized("the Authorization header has no token; send it as `Authorization: Bearer …`", "TOKEN_MISSING")
        shown = _hash(token.strip())
        if hmac.compare_digest(shown, self._owner):
            return Identity(OWNER, OWNER)
        row = self._database.row("SELECT * FROM tokens WHERE hash = ?", [shown])
        if row is None:
            raise _unauthorized("the token is not one of this controller's; log in again", "TOKEN_INVALID")
        if row["revoked"]:
            raise _unauthorized("the token was revoked; log in again", "TOKEN_REVOKED")
        if datetime.fromisoformat(row["expires_at"]) < datetime.now(UTC):
            raise _unauthorized("the token is over; log in again", "TOKEN_EXPIRED")
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


def require_owner(who: Identity) -> None:
    """ControllerError 403 for all but the owner."""
    if not who.is_owner:
        text = "this needs the owner's token, which lies in the controller's folder; run the command on the controller's machine"
        raise ControllerError(text, code="FORBIDDEN", status=403)


def _hash(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _unauthorized(message: str, code: str) -> ControllerError:
    return ControllerError(message, code=code, status=401)


LOGINS_TABLE = """CREATE TABLE IF NOT EXISTS logins (
    device_hash TEXT PRIMARY KEY, user_code TEXT NOT NULL UNIQUE, name TEXT NOT NULL, until REAL NOT NULL, answer TEXT)"""
CODE_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ23456789"
"""Of a user's code: none that is taken for another, none that makes words."""
LOGIN_LIFETIME_S = 900
POLL_INTERVAL_S = 2
MAX_LOGINS = 50
"""Logins that wait at once: anyone who reaches the controller may begin one."""


class PendingLogin(NamedTuple):
    """A login that waits."""

    device_code: str
    user_code: str


class DeviceLogins:
    """Those that wait. They are few and short-lived, and survive a controller that is started again."""

    def __init__(self, database: ControllerDatabase, tokens: ApiTokens) -> None:
        self._database = database
        self._tokens = tokens
        database.create(LOGINS_TABLE)

    def begin(self, name: str) -> PendingLogin:
        """For a device of this name."""
        with self._database.transaction():
            self._database.write("DELETE FROM logins WHERE until < ?", [time.time()])
            waiting = self._database.rows("SELECT count(*) FROM logins")[0][0]
            if waiting >= MAX_LOGINS:
                raise ControllerError(f"{waiting} logins wait already; try again later", code="TOO_MANY_LOGINS", status=429)
            code = "".join(secrets.choice(CODE_ALPHABET) for _ in range(8))
            begun = PendingLogin(secrets.token_urlsafe(32), f"{code[:4]}-{code[4:]}")
            statement = "INSERT INTO logins (device_hash, user_code, name, until) VALUES (?, ?, ?, ?)"
            self._database.write(statement, [_hash_code(begun.device_code), begun.user_code, name, time.time() + LOGIN_LIFETIME_S])
        return begun

    def answer(self, user_code: str, *, approve: bool) -> str:
        """Let the device in that shows this code, or not; its name. A code is answered once."""
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
        """For a device that was let in, once; until then, ControllerError with the platform's word for how it stands."""
        device = _hash_code(device_code)
        with self._database.transaction():
            row = self._database.row("SELECT * FROM logins WHERE device_hash = ?", [device])
            if row is None or row["until"] < time.time():
                raise _login_state("expired_token")
            if row["answer"] == "denied":
                raise _login_state("access_denied")
            if row["answer"] is None:
                raise _login_state("authorization_pending")
            self._database.write("DELETE FROM logins WHERE device_hash = ?", [device])
            return self._tokens.make(row["name"])


def normalize_code(text: str) -> str:
    """As it was shown, however it was typed: upper case, one dash."""
    letters = re.sub(r"[^A-Z0-9]", "", text.upper())[:8]
    return f"{letters[:4]}-{letters[4:]}" if letters else ""


def _login_state(word: str) -> ControllerError:
    return ControllerError(word, code=word.upper(), status=400)


def _hash_code(code: str) -> str:
    return sha256(code.encode("utf-8", "surrogatepass")).hexdigest()


class AccountRoutes:
    """Routes of who asks."""

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
        begun = self._logins.begin(string_field(body, "deviceName", default="a device")[:100])
        page = f"{self._links.base}/device"
        whole = {"verification_uri": page, "verification_uri_complete": f"{page}?code={begun.user_code}"}
        return reply(begun._asdict() | whole | {"expires_in": LOGIN_LIFETIME_S, "interval": POLL_INTERVAL_S})

    async def _page(self, request: Request) -> Response:
        """What the browser of who logs in shows: whom to ask."""
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


def _user(who: Identity) -> dict[str, str]:
    return {"id": who.token_id, "email": who.email, "name": who.name}
