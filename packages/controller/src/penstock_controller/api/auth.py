"""Authentication: the owner's token from the home folder, tokens of devices, and the device logins that create them.

Of device tokens only hashes are stored. Every route has an entry in ROUTE_ACCESS.
"""

import asyncio
import hmac
import re
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.errors import ControllerError
from penstock_controller.api.bodies import page_reply, page_request, read_object, reply, string_field
from penstock_controller.api.links import SignedLinks
from penstock_controller.database import ControllerDatabase
from penstock_controller.identity import DEVICE, GIT_HEADER, OWNER, THE_OWNER, Identity, check_person, device_identity, require_own
from penstock_controller.runs import new_id, now

TOKENS_TABLE = """CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL, created_at TEXT NOT NULL, expires_at TEXT NOT NULL,
    revoked INTEGER NOT NULL DEFAULT 0, person TEXT NOT NULL DEFAULT '')"""
LOGINS_TABLE = """CREATE TABLE IF NOT EXISTS logins (
    device_hash TEXT PRIMARY KEY, user_code TEXT NOT NULL UNIQUE, name TEXT NOT NULL, until REAL NOT NULL, answer TEXT,
    person TEXT NOT NULL DEFAULT '', caller TEXT NOT NULL DEFAULT '')"""
TOKEN_LIFETIME = timedelta(days=90)
LOGIN_LIFETIME_S = 900
POLL_INTERVAL_S = 2
MAX_LOGINS, MAX_LOGINS_OF_CALLER = 500, 10
"""Logins that wait at once, in all and of one address: anyone who reaches the controller can start one."""
CODE_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ23456789"
"""The characters of user codes: none that look alike, and no vowels, so that no words occur."""


class AccessLevel(StrEnum):
    """What a route requires of its caller."""

    NOTHING = "nothing"
    LINK = "link"
    """A signed link that the controller gave to someone with a token."""
    TOKEN = "token"
    """Any token."""
    OWN = "own"
    """The token of whom the thing belongs to, or the owner's. The route checks it."""
    OWNER = "owner"


_OPEN, _TOKEN, _OWN, _LINK = AccessLevel.NOTHING, AccessLevel.TOKEN, AccessLevel.OWN, AccessLevel.LINK
ROUTE_ACCESS: Mapping[str, AccessLevel] = {
    "GET /health": _OPEN,
    "GET /device": _OPEN,
    "GET /view/": _OPEN,
    "GET /view/{file}": _OPEN,
    "GET /view/api/{screen}": _TOKEN,
    "POST /api/cli/device/authorize": _OPEN,
    "POST /api/cli/device/token": _OPEN,
    "POST /api/cli/device/approve": AccessLevel.OWNER,
    "GET /api/cli/verify": _TOKEN,
    "GET /api/cli/tokens": _TOKEN,
    "DELETE /api/cli/tokens/{token_id}": _OWN,
    "GET /api/cli/eval-runs": _TOKEN,
    "POST /api/cli/eval-runs": _TOKEN,
    "GET /api/cli/eval-runs/{ref}": _TOKEN,
    "POST /api/cli/eval-runs/{ref}/stop": _OWN,
    "GET /api/cli/eval-runs/{ref}/metrics": _TOKEN,
    "GET /api/cli/eval-runs/{ref}/logs": _TOKEN,
    "GET /api/cli/eval-runs/{ref}/samples/manifest": _TOKEN,
    "POST /api/cli/eval-runs/{ref}/samples/download-urls": _TOKEN,
    "GET /api/cli/training-runs": _TOKEN,
    "POST /api/cli/training-runs": _TOKEN,
    "GET /api/cli/training-runs/{ref}": _TOKEN,
    "POST /api/cli/training-runs/{ref}/stop": _OWN,
    "GET /api/cli/training-runs/{ref}/metrics": _TOKEN,
    "GET /api/cli/training-runs/{ref}/logs": _TOKEN,
    "GET /api/cli/training-runs/{ref}/checkpoints": _TOKEN,
    "GET /api/cli/training-runs/{ref}/samples/manifest": _TOKEN,
    "POST /api/cli/training-runs/{ref}/samples/download-urls": _TOKEN,
    "GET /api/cli/links/output/{token}": _LINK,
    "PUT /api/cli/snapshots/{digest}": _TOKEN,
    "GET /api/cli/datasets": _TOKEN,
    "POST /api/cli/datasets": _OWN,
    "GET /api/cli/datasets/{ref}": _TOKEN,
    "POST /api/cli/datasets/{ref}/complete": _OWN,
    "POST /api/cli/datasets/{ref}/abort": _OWN,
    "GET /api/cli/datasets/{ref}/download": _TOKEN,
    "GET /api/cli/datasets/{ref}/logs": _TOKEN,
    "PUT /api/cli/links/dataset-upload/{token}": _LINK,
    "GET /api/cli/links/dataset/{token}": _LINK,
    "GET /api/cli/models/base": _TOKEN,
    "GET /api/cli/models/lora": _TOKEN,
    "GET /api/cli/models/{name}": _TOKEN,
    "POST /api/cli/models/{name}/deploy": _TOKEN,
    "POST /api/cli/models/{name}/undeploy": _OWN,
    "GET /api/cli/environment-secrets": _TOKEN,
    "POST /api/cli/environment-secrets": _OWN,
    "DELETE /api/cli/environment-secrets": _OWN,
    "GET /api/cli/repositories": _TOKEN,
    "POST /api/cli/repositories": AccessLevel.OWNER,
    "GET /api/cli/rollouts": _TOKEN,
}
"""Every route with its access level; a route that is not here is not served. docs/design/controller.md has the same table."""


class DeviceToken(NamedTuple):
    """A device's token, in a list."""

    device: str
    """As the device called itself."""
    created_at: str
    bearer: Identity


class ApiTokens:
    """The owner's token and the table of device tokens."""

    def __init__(self, database: ControllerDatabase, owner_token: str) -> None:
        self._database = database
        self._owner = _hash(owner_token)
        database.create(TOKENS_TABLE)
        database.add_column("tokens", "person TEXT NOT NULL DEFAULT ''")

    def create(self, name: str, *, person: str = "") -> tuple[str, Identity]:
        """Creates a token for a device of `person`, or for a separate device if it is empty; stores only its hash."""
        token, token_id = f"pst_{secrets.token_urlsafe(32)}", new_id()
        expires_at = (datetime.now(UTC) + TOKEN_LIFETIME).isoformat(timespec="seconds")
        statement = "INSERT INTO tokens (id, hash, name, created_at, expires_at, person) VALUES (?, ?, ?, ?, ?, ?)"
        self._database.write(statement, [token_id, _hash(token), name, now(), expires_at, person])
        return token, device_identity(token_id, name, expires_at, person)

    def identify(self, authorization: str | None) -> Identity:
        """Returns whose token an Authorization header has; ControllerError 401 with one of the platform's codes."""
        if authorization is None:
            raise _unauthorized("no token was sent; send it as `Authorization: Bearer …`", "AUTH_HEADER_MISSING")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _unauthorized("the Authorization header has no token; send it as `Authorization: Bearer …`", "TOKEN_MISSING")
        token_hash = _hash(token.strip())
        if hmac.compare_digest(token_hash, self._owner):
            return THE_OWNER
        row = self._database.row("SELECT * FROM tokens WHERE hash = ?", [token_hash])
        if row is None:
            raise _unauthorized("the token is not one of this controller's; log in again", "TOKEN_INVALID")
        if row["revoked"]:
            raise _unauthorized("the token was revoked; log in again", "TOKEN_REVOKED")
        if datetime.fromisoformat(row["expires_at"]) < datetime.now(UTC):
            raise _unauthorized("the token is over; log in again", "TOKEN_EXPIRED")
        return _bearer(row)

    def page(self, who: Identity, *, limit: int, offset: int) -> tuple[list[DeviceToken], int]:
        """Returns a page of the tokens that `who` may revoke and that are not over, newest first, and the total count."""
        rows = self._database.rows("SELECT * FROM tokens WHERE revoked = 0 ORDER BY created_at DESC, id")
        moment = datetime.now(UTC)
        found = [row for row in rows if datetime.fromisoformat(row["expires_at"]) >= moment and who.may_change(_bearer(row).person)]
        chosen = [DeviceToken(row["name"], row["created_at"], _bearer(row)) for row in found[offset : offset + limit]]
        return chosen, len(found)

    def revoke(self, token_id: str, who: Identity) -> None:
        """Revokes a token: one of the same person's, or as the owner any."""
        if token_id == OWNER:
            text = "the owner's token lies in the controller's folder; remove the file `token` there and start it again"
            raise ControllerError(text, code="TOKEN_PERMANENT", status=409)
        row = self._database.row("SELECT * FROM tokens WHERE id = ?", [token_id])
        if row is None and not who.is_owner:  # as for another's: who has no business here learns nothing
            require_own(who, "", "the token")
        if row is None:
            raise ControllerError(
                f"there is no token {token_id!r}; see: penstock controller devices", code="TOKEN_NOT_FOUND", status=404
            )
        require_own(who, _bearer(row).person, "the token")
        self._database.write("UPDATE tokens SET revoked = 1 WHERE id = ?", [token_id])


class PendingLogin(NamedTuple):
    device_code: str
    user_code: str


class DeviceLogins:
    """The table of pending device logins.

    It is bounded by dropping logins that nobody has answered, never by refusing one: of a caller with too many its own oldest, of
    too many in all the oldest of the caller who has most. So a flood pushes out itself.
    """

    def __init__(self, database: ControllerDatabase, tokens: ApiTokens) -> None:
        self._database = database
        self._tokens = tokens
        database.create(LOGINS_TABLE)
        for column in ("person", "caller"):
            database.add_column("logins", f"{column} TEXT NOT NULL DEFAULT ''")

    def begin(self, name: str, caller: str) -> PendingLogin:
        """Starts a login for a device of this name, at the address `caller`."""
        code = "".join(secrets.choice(CODE_ALPHABET) for _ in range(8))
        login = PendingLogin(secrets.token_urlsafe(32), f"{code[:4]}-{code[4:]}")
        group, until = caller_group(caller), time.time() + LOGIN_LIFETIME_S
        with self._database.transaction():
            self._database.write("DELETE FROM logins WHERE until < ?", [time.time()])
            statement = "INSERT INTO logins (device_hash, user_code, name, until, caller) VALUES (?, ?, ?, ?, ?)"
            self._database.write(statement, [_hash(login.device_code), login.user_code, name, until, group])
            if len(self._waiting(group)) > MAX_LOGINS_OF_CALLER:
                self._drop_oldest(group)
            if len(waiting := self._waiting()) > MAX_LOGINS:
                self._drop_oldest(Counter(waiting).most_common(1)[0][0])
        return login

    def _waiting(self, caller: str | None = None) -> list[str]:
        """Returns the caller of each login that waits, oldest first."""
        statement = "SELECT caller FROM logins WHERE answer IS NULL AND caller = coalesce(?, caller) ORDER BY until"
        return [row["caller"] for row in self._database.rows(statement, [caller])]

    def _drop_oldest(self, caller: str) -> None:
        oldest = "SELECT device_hash FROM logins WHERE answer IS NULL AND caller = ? ORDER BY until LIMIT 1"
        self._database.write(f"DELETE FROM logins WHERE device_hash = ({oldest})", [caller])

    def answer(self, user_code: str, *, approve: bool, person: str = "") -> str:
        """Approves or denies the login with this code, once; returns the device's name."""
        code = normalize_code(user_code)
        name = self._database.row("SELECT name FROM logins WHERE user_code = ?", [code])
        statement = "UPDATE logins SET answer = ?, person = ? WHERE user_code = ? AND answer IS NULL AND until >= ?"
        changed = self._database.write(statement, ["approved" if approve else "denied", person, code, time.time()])
        if name is None or not changed:
            minutes = LOGIN_LIFETIME_S // 60
            text = f"no login waits with the code {code or user_code[:20]!r}; codes are good for {minutes} minutes, once"
            raise ControllerError(f"{text}; begin the login again on the device", code="CODE_UNKNOWN", status=404)
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
            return self._tokens.create(row["name"], person=row["person"])


class AccountRoutes:
    """Routes for logins and tokens."""

    def __init__(self, tokens: ApiTokens, logins: DeviceLogins, links: SignedLinks, isolation: str) -> None:
        self._tokens = tokens
        self._isolation = isolation
        """A sentence about whom the owner trusts with what."""
        self._links = links
        self._logins = logins

    def routes(self) -> list[Route]:
        return [
            Route("/device", self._page, methods=["GET"]),
            Route("/api/cli/verify", self._verify, methods=["GET"]),
            Route("/api/cli/device/authorize", self._authorize, methods=["POST"]),
            Route("/api/cli/device/token", self._token, methods=["POST"]),
            Route("/api/cli/device/approve", self._approve, methods=["POST"]),
            Route("/api/cli/tokens", self._list, methods=["GET"]),
            Route("/api/cli/tokens/{token_id}", self._revoke, methods=["DELETE"]),
        ]

    async def _verify(self, request: Request) -> Response:
        who: Identity = request.state.who
        body = {"user": _user(who), "token_id": who.token_id, "isolation": self._isolation}
        body |= {"expires_at": who.expires_at} if who.expires_at else {}
        git = request.headers.get(GIT_HEADER)
        role = "owner" if who.is_owner else "member"
        return reply(body | ({"workspace": {"id": git, "name": git, "role": role}} if git else {}))

    async def _authorize(self, request: Request) -> Response:
        body = await read_object(request)
        name = " ".join(string_field(body, "deviceName", default="a device").split())[:100]
        login = await asyncio.to_thread(self._logins.begin, name, caller_address(request, self._links))
        page = f"{self._links.base}/device"
        uris = {"verification_uri": page, "verification_uri_complete": f"{page}?code={login.user_code}"}
        return reply(login._asdict() | uris | {"expires_in": LOGIN_LIFETIME_S, "interval": POLL_INTERVAL_S})

    async def _page(self, request: Request) -> Response:
        """Returns the page that the device's browser shows: how the owner approves the login."""
        code = normalize_code(request.query_params.get("code", "")) or "CODE"
        command = f"penstock controller approve {code}"
        text = f"To let this device in, run on the controller's machine:\n\n    {command}\n\n{self._isolation}\n"
        return PlainTextResponse(text, headers={"cache-control": "no-store", "x-content-type-options": "nosniff"})

    async def _token(self, request: Request) -> Response:
        token, who = self._logins.token(string_field(await read_object(request), "device_code"))
        return reply({"token": token, "user": _user(who), "token_id": who.token_id, "expires_at": who.expires_at})

    async def _approve(self, request: Request) -> Response:
        body = await read_object(request)
        approve, person = body.get("deny") is not True, body.get("person")
        person = "" if person is None else check_person(string_field(body, "person"))
        name = self._logins.answer(string_field(body, "user_code"), approve=approve, person=person)
        return reply(
            {
                "device_name": name,
                "person": person or None,
                "status": "approved" if approve else "denied",
                "isolation": self._isolation,
            }
        )

    async def _list(self, request: Request) -> Response:
        limit, offset = page_request(request)
        found, total = await asyncio.to_thread(self._tokens.page, request.state.who, limit=limit, offset=offset)
        return page_reply("tokens", [_token_record(each) for each in found], total, limit, offset)

    async def _revoke(self, request: Request) -> Response:
        self._tokens.revoke(request.path_params["token_id"], request.state.who)
        return reply({"id": request.path_params["token_id"], "status": "revoked"})


def normalize_code(text: str) -> str:
    """Returns a typed code in upper case with one dash."""
    letters = re.sub(r"[^A-Z0-9]", "", text.upper())[:8]
    return f"{letters[:4]}-{letters[4:]}" if letters else ""


def caller_address(request: Request, links: SignedLinks) -> str:
    """Returns the address that a request comes from: of a controller behind a proxy, the last that the proxy has written down."""
    forwarded = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip() if links.is_proxied else ""
    return forwarded or (request.client.host if request.client else "")


def caller_group(address: str) -> str:
    """Returns what counts as one caller: an IPv4 address, or the /64 network of an IPv6 one, which a single host can have.

    >>> caller_group("203.0.113.7"), caller_group("2001:db8::7")
    ('203.0.113.7', '2001:db8::/64')
    """
    try:
        found = ip_address(address.strip("[]"))
    except ValueError:
        return address[:100]
    found = getattr(found, "ipv4_mapped", None) or found
    return str(ip_network((found, 64), strict=False)) if found.version == 6 else str(found)


def _bearer(row: sqlite3.Row) -> Identity:
    return device_identity(row["id"], row["name"], row["expires_at"], row["person"])


def _token_record(token: DeviceToken) -> dict[str, Any]:
    person = None if token.bearer.person.startswith(DEVICE) else token.bearer.person
    times = {"created_at": token.created_at, "expires_at": token.bearer.expires_at}
    return {"id": token.bearer.token_id, "device_name": token.device, "person": person, **times}


def _user(who: Identity) -> dict[str, str]:
    return {"id": who.token_id, "email": who.email, "name": who.name}


def _hash(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _unauthorized(message: str, code: str) -> ControllerError:
    return ControllerError(message, code=code, status=401)


def _login_state(word: str) -> ControllerError:
    return ControllerError(word, code=word.upper(), status=400)
