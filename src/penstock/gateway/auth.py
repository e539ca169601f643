"""The gateway's tokens and what each opens.

    model token    the agent's: model routes of one rollout
    flow token     a flow's: submit, grade and complete one rollout
    control token  the runner's: control routes, and the flow routes of any rollout
    admin token    the operator's: metrics and the read API
    session key    of clients that send a session id: model routes, a rollout for each session

A model or flow token is the rollout's id and its signature under the run's secret, so any gateway of the run verifies it without a
lookup. Every route names the access it needs. A rollout id that `new_signed_id` made is signed itself: in a path it opens that
rollout's model routes.

An `open` gateway asks for the control token only: whoever reaches it may name any rollout.
"""

import hmac
import secrets
from collections import OrderedDict
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from penstock.errors import ConfigError, RequestError
from penstock.http.asgi import Headers, header

ANY_SESSION = "*"
"""The rollout of the session key: the one that the request's session id names."""
MAX_CACHED_TOKENS = 10_000
"""Verified tokens that are kept: an agent sends the same one with each call."""


class Access(StrEnum):
    """The token that a route needs."""

    NONE = "nothing"
    MODEL = "model"
    FLOW = "flow"
    CONTROL = "control"
    ADMIN = "admin"


class VerifiedToken(NamedTuple):
    """What a valid token opens, and for which rollout (empty: any)."""

    kind: Access
    rollout_id: str


class GatewayTokens:
    """Makes and verifies the tokens of one run."""

    def __init__(self, secret: bytes, *, is_open: bool = False, sessions: bool = False) -> None:
        self.is_open = is_open
        self._has_sessions = sessions
        if len(secret) < 16:
            raise ConfigError(f"the gateway's secret has {len(secret)} bytes; give at least 16 random ones")
        self._key = hmac.new(secret, digestmod=sha256)
        self._verified = OrderedDict[str, VerifiedToken]()
        """Model and flow tokens only."""
        self.control = f"ck-{self._sign('control')}"
        """The runner holds it; an agent never sees it."""
        self.admin = f"ak-{self._sign('admin')}"
        self.session_key = f"sk-{self._sign('sessions')}"
        """Opens the model routes of a rollout for each session of its clients, if the gateway was started for that."""

    def model(self, rollout_id: str) -> str:
        """The rollout's model token."""
        return f"mk-{rollout_id}.{self._sign(f'model:{rollout_id}')}"

    def issue(self, rollout_id: str) -> str:
        """The rollout's model token, put into the cache of verified ones."""
        token = self.model(rollout_id)
        self._remember(token, VerifiedToken(Access.MODEL, rollout_id))
        return token

    def flow(self, rollout_id: str) -> str:
        """The rollout's flow token."""
        return f"fk-{rollout_id}.{self._sign(f'flow:{rollout_id}')}"

    def new_signed_id(self) -> str:
        """A new signed rollout id of 32 hexadecimal digits."""
        half = secrets.token_hex(8)
        return half + self._sign(f"trajectory:{half}")[:16]

    def is_signed_id(self, uid: str) -> bool:
        """Whether `new_signed_id` made it, in any gateway with the same secret."""
        known = self._sign(f"trajectory:{uid[:16]}")[:16]
        return len(uid) == 32 and hmac.compare_digest(uid[16:].encode("utf-8", "replace"), known.encode())

    def rollout_of(self, name: str) -> str:
        """The rollout that a path segment names: by its model token, or by its id."""
        verified = self._verify(name)
        return verified.rollout_id if verified is not None and verified.kind is Access.MODEL else name

    def authorize(self, access: Access, headers: Headers, in_path: str = "") -> str:
        """The rollout of the caller's token, empty if none is needed or any is meant; RequestError 401 or 403.

        A valid token in a header takes precedence over one in the path. Clients that must send some key may send any: an invalid
        one is ignored if the path holds a valid one.
        """
        if access is Access.NONE:
            return ""
        in_header = _header_token(headers)
        if (known := self._verified.get(in_header or in_path)) is not None and known.kind is access:
            return known.rollout_id
        tokens = [token for token in (in_header, in_path) if token]
        verified = [each for token in tokens if (each := self._verify(token)) is not None]
        if self.is_open and access is not Access.CONTROL:
            return next((each.rollout_id for each in verified if each.kind is access), in_path)
        if not verified and access is Access.MODEL and self.is_signed_id(in_path):
            return in_path
        if not verified:
            what = "is not valid" if tokens else "is missing"
            message = f"the {access} token {what}; send it as `Authorization: Bearer …` or `x-api-key`"
            raise RequestError(message, status=401, code="invalid_api_key")
        kind, rollout_id = verified[0]
        if kind is not access and (kind, access) != (Access.CONTROL, Access.FLOW):
            raise RequestError(f"a {kind} token does not open this route; it needs a {access} token", status=403, code="forbidden")
        return rollout_id

    def _verify(self, token: str) -> VerifiedToken | None:
        if (known := self._verified.get(token)) is not None:
            return known
        rollout_id = token[3:].rpartition(".")[0]
        presented, found = token.encode("utf-8", "replace"), None
        valid_tokens = {
            Access.MODEL: self.model(rollout_id),
            Access.FLOW: self.flow(rollout_id),
            Access.CONTROL: self.control,
            Access.ADMIN: self.admin,
        }
        if self._has_sessions and hmac.compare_digest(presented, self.session_key.encode()):
            return self._remember(token, VerifiedToken(Access.MODEL, ANY_SESSION))
        for kind, valid in valid_tokens.items():  # all are compared, in constant time: timing must not reveal which
            if hmac.compare_digest(presented, valid.encode("utf-8", "replace")):
                found = kind
        if found is None or found not in (Access.MODEL, Access.FLOW):
            return found and VerifiedToken(found, "")
        return self._remember(token, VerifiedToken(found, rollout_id))

    def _remember(self, token: str, verified: VerifiedToken) -> VerifiedToken:
        while len(self._verified) >= MAX_CACHED_TOKENS:
            self._verified.popitem(last=False)
        self._verified[token] = verified
        return verified

    def _sign(self, text: str) -> str:
        signing = self._key.copy()
        signing.update(text.encode("utf-8", "replace"))
        return signing.hexdigest()[:40]


def _header_token(headers: Headers) -> str:
    scheme, _, token = header(headers, b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header(headers, b"x-api-key")
