"""Who may call what: a model token for the agent, a flow token for code that may also submit and grade its own rollout, a control
token for the runner, an admin token for who operates the gateway.

A model or flow token is the rollout's id and its signature under the run's secret, so any gateway of the run can tell whose it is
without looking anything up. Every route says what it needs; one that says nothing cannot be made, and no token opens more than
its own kind of route.
"""

import hmac
from collections.abc import Iterable
from enum import StrEnum
from hashlib import sha256

from penstock.errors import ConfigError, RequestError

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI gives them: names in lower case."""


SEEN = 10_000


class Needs(StrEnum):
    """What a route asks of its caller."""

    NOTHING = "nothing"
    MODEL = "model"
    CONTROL = "control"
    ADMIN = "admin"


class Tokens:
    """Makes and recognises the tokens of one run."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ConfigError(f"the gateway's secret has {len(secret)} bytes; give at least 16 random ones")
        self._key = hmac.new(secret, digestmod=sha256)
        self._seen: dict[str, str] = {}
        """Model tokens that proved right, with their rollouts: an agent sends the same one with each call."""
        self.control = f"ck-{self._sign('control')}"
        """Opens the control routes; the runner holds it, an agent never sees it."""
        self.admin = f"ak-{self._sign('admin')}"
        """Opens the routes by which a gateway is watched."""

    def model(self, rollout_id: str) -> str:
        """Opens the model routes for this rollout, nothing else."""
        return f"mk-{rollout_id}.{self._sign(f'model:{rollout_id}')}"

    def flow(self, rollout_id: str) -> str:
        """Opens the flow routes for this rollout: what it says of itself is submitted, graded and completed there."""
        return f"fk-{rollout_id}.{self._sign(f'flow:{rollout_id}')}"

    def admit(self, needs: Needs, headers: Headers, in_path: str = "") -> str:
        """The rollout that the caller's token names, empty where none is needed; RequestError 401 or 403.

        A token in a header goes before one in the path: a client that must send some key may send any, and be known by the path.
        """
        if needs is Needs.NOTHING:
            return ""
        tokens = [token for token in (_presented(headers), in_path) if token]
        held = [(kind, rollout_id) for token in tokens for kind, rollout_id in [self._recognise(token)] if kind is not None]
        if not held:
            what = "is not valid" if tokens else "is missing"
            message = f"the {needs} token {what}; send it as `Authorization: Bearer …` or `x-api-key`"
            raise RequestError(message, status=401, code="invalid_api_key")
        kind, rollout_id = held[0]
        if kind is not needs:
            raise RequestError(f"a {kind} token does not open this route; it needs a {needs} token", status=403, code="forbidden")
        return rollout_id

    def _recognise(self, token: str) -> tuple[Needs | None, str]:
        """What kind of token it is, and whose; each comparison takes the same time wherever they differ."""
        if (rollout_id := self._seen.get(token)) is not None:
            return Needs.MODEL, rollout_id
        rollout_id, _, _ = token.removeprefix("mk-").rpartition(".")
        given, found = token.encode("utf-8", "replace"), None
        for kind, known in ((Needs.MODEL, self.model(rollout_id)), (Needs.CONTROL, self.control), (Needs.ADMIN, self.admin)):
            if hmac.compare_digest(given, known.encode("utf-8", "replace")):
                found = kind
        if found is not Needs.MODEL:
            return found, ""
        while len(self._seen) >= SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[token] = rollout_id
        return found, rollout_id

    def _sign(self, text: str) -> str:
        signing = self._key.copy()
        signing.update(text.encode("utf-8", "replace"))
        return signing.hexdigest()[:40]


def header(headers: Headers, name: bytes) -> str:
    """The value of a header; empty where it is absent."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return ""


def _presented(headers: Headers) -> str:
    scheme, _, token = header(headers, b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header(headers, b"x-api-key")
