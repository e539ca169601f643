"""Who may call what: a model token for the agent, a control token for the runner, and nothing for anybody else.

A model token is the rollout's id and its signature under the run's secret, so any gateway of the run can tell whose it is
without looking anything up. Every route says what it needs; one that says nothing cannot be made.
"""

import hmac
from collections.abc import Iterable
from enum import StrEnum
from hashlib import sha256

from penstock.errors import ConfigError, RequestError

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI gives them: names in lower case."""


class Needs(StrEnum):
    """What a route asks of its caller."""

    NOTHING = "nothing"
    MODEL = "model"
    CONTROL = "control"


class Tokens:
    """Makes and recognises the tokens of one run."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ConfigError(f"the gateway's secret has {len(secret)} bytes; give at least 16 random ones")
        self._secret = secret
        self.control = f"ck-{self._sign('control')}"
        """Opens the control routes; the runner holds it, an agent never sees it."""

    def model(self, rollout_id: str) -> str:
        """Opens the model routes for this rollout, nothing else."""
        return f"mk-{rollout_id}.{self._sign(f'model:{rollout_id}')}"

    def admit(self, needs: Needs, headers: Headers) -> str:
        """The rollout that the caller's token names, empty where none is needed; RequestError 401 or 403."""
        if needs is Needs.NOTHING:
            return ""
        token = _presented(headers)
        rollout_id = self._rollout(token)
        is_control = hmac.compare_digest(token.encode(), self.control.encode())
        if rollout_id is None and not is_control:
            what = "is not valid" if token else "is missing"
            message = f"the {needs} token {what}; send it as `Authorization: Bearer …` or `x-api-key`"
            raise RequestError(message, status=401, code="invalid_api_key")
        if is_control != (needs is Needs.CONTROL):
            held = "control" if is_control else "model"
            raise RequestError(f"a {held} token does not open this route; it needs a {needs} token", status=403, code="forbidden")
        return rollout_id or ""

    def _rollout(self, token: str) -> str | None:
        rollout_id, _, _ = token.removeprefix("mk-").rpartition(".")
        return rollout_id if hmac.compare_digest(token.encode(), self.model(rollout_id).encode()) else None

    def _sign(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), sha256).hexdigest()[:40]


def header(headers: Headers, name: bytes) -> str:
    """The value of a header; empty where it is absent."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def _presented(headers: Headers) -> str:
    scheme, _, token = header(headers, b"authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header(headers, b"x-api-key")
