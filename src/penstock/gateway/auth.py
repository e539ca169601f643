"""Who may call what: a model token for the agent, a flow token for code that may also submit and grade its own rollout, a control
token for the runner, an admin token for who operates the gateway.

A model or flow token is the rollout's id and its signature under the run's secret, so any gateway of the run can tell whose it is
without looking anything up. Every route says what it needs; one that says nothing cannot be made, and no token opens more than
its own kind of route, but for the control token, which opens flow routes too. The uid of a trajectory that a gateway began is
signed in itself: in a path it opens that trajectory's model routes.

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

"""As ASGI gives them: names in lower case."""


SEEN = 10_000


class Needs(StrEnum):
    """What a route asks of its caller."""

    NOTHING = "nothing"
    MODEL = "model"
    FLOW = "flow"
    CONTROL = "control"
    ADMIN = "admin"


class Held(NamedTuple):
    """A token that is right: what it opens, and whose it is."""

    kind: Needs
    rollout_id: str


class Tokens:
    """Makes and recognises the tokens of one run."""

    def __init__(self, secret: bytes, *, is_open: bool = False) -> None:
        self.is_open = is_open
        if len(secret) < 16:
            raise ConfigError(f"the gateway's secret has {len(secret)} bytes; give at least 16 random ones")
        self._key = hmac.new(secret, digestmod=sha256)
        self._seen = OrderedDict[str, Held]()
        """Model and flow tokens that proved right: an agent sends the same one with each call."""
        self.control = f"ck-{self._sign('control')}"
        """Opens the control routes; the runner holds it, an agent never sees it."""
        self.admin = f"ak-{self._sign('admin')}"
        """Opens the routes by which a gateway is watched."""

    def model(self, rollout_id: str) -> str:
        """Opens the model routes for this rollout, nothing else."""
        return f"mk-{rollout_id}.{self._sign(f'model:{rollout_id}')}"

    def issue(self, rollout_id: str) -> str:
        """The same, known at once when it comes back."""
        token = self.model(rollout_id)
        self._remember(token, Held(Needs.MODEL, rollout_id))
        return token

    def flow(self, rollout_id: str) -> str:
        """Opens the flow routes for this rollout: what it says of itself is submitted, graded and completed there."""
        return f"fk-{rollout_id}.{self._sign(f'flow:{rollout_id}')}"

    def trajectory(self) -> str:
        """A new uid, 32 hexadecimal digits; in a path it opens the model routes of the rollout of that id, nothing else."""
        half = secrets.token_hex(8)
        return half + self._sign(f"trajectory:{half}")[:16]

    def is_trajectory(self, uid: str) -> bool:
        """Whether `trajectory` made it, in whatever gateway with the same secret."""
        known = self._sign(f"trajectory:{uid[:16]}")[:16]
        return len(uid) == 32 and hmac.compare_digest(uid[16:].encode("utf-8", "replace"), known.encode())

    def rollout_of(self, name: str) -> str:
        """The rollout that a path names, by its model token or plainly."""
        held = self._recognise(name)
        return held.rollout_id if held is not None and held.kind is Needs.MODEL else name

    def admit(self, needs: Needs, headers: Headers, in_path: str = "") -> str:
        """The rollout that the caller's token names, empty where none is needed or any is meant; RequestError 401 or 403.

        A token in a header goes before one in the path: a client that must send some key may send any, and be known by the path.
        """
        if needs is Needs.NOTHING:
            return ""
        presented = _presented(headers)
        if (seen := self._seen.get(presented or in_path)) is not None and seen.kind is needs:
            return seen.rollout_id
        tokens = [token for token in (presented, in_path) if token]
        held = [each for token in tokens if (each := self._recognise(token)) is not None]
        if self.is_open and needs is not Needs.CONTROL:
            return next((each.rollout_id for each in held if each.kind is needs), in_path)
        if not held and needs is Needs.MODEL and self.is_trajectory(in_path):
            return in_path
        if not held:
            what = "is not valid" if tokens else "is missing"
            message = f"the {needs} token {what}; send it as `Authorization: Bearer …` or `x-api-key`"
            raise RequestError(message, status=401, code="invalid_api_key")
        kind, rollout_id = held[0]
        if kind is not needs and (kind, needs) != (Needs.CONTROL, Needs.FLOW):
            raise RequestError(f"a {kind} token does not open this route; it needs a {needs} token", status=403, code="forbidden")
        return rollout_id

    def _recognise(self, token: str) -> "Held | None":
        """What kind of token it is, and whose; each comparison takes the same time wherever they differ."""
        if (held := self._seen.get(token)) is not None:
            return held
        rollout_id = token[3:].rpartition(".")[0]
        given, found = token.encode("utf-8", "replace"), None
        known = {
            Needs.MODEL: self.model(rollout_id),
            Needs.FLOW: self.flow(rollout_id),
            Needs.CONTROL: self.control,
            Needs.ADMIN: self.admin,
        }
        for kind, right in known.items():
            if hmac.compare_digest(given, right.encode("utf-8", "replace")):
                found = kind
        if found is None or found not in (Needs.MODEL, Needs.FLOW):
            return found and Held(found, "")
        return self._remember(token, Held(found, rollout_id))

    def _remember(self, token: str, held: Held) -> Held:
        while len(self._seen) >= SEEN:
            self._seen.popitem(last=False)
        self._seen[token] = held
        return held

    def _sign(self, text: str) -> str:
        signing = self._key.copy()
        signing.update(text.encode("utf-8", "replace"))
        return signing.hexdigest()[:40]


def _presented(headers: Headers) -> str:
    scheme, _, token = header(headers, b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header(headers, b"x-api-key")
