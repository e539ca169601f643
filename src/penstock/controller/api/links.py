"""Links that carry their own authority, for clients that send no token to them: signed, and good for a while.

A link is `/api/cli/links/<what>/<token>`. The app reads the token of every request under `/api/cli/links/` before its route does,
and leaves the facts in `request.state.link`, so that no such route can forget to.
"""

import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import orjson

from penstock.errors import ControllerError

PATH = "/api/cli/links"
LIFETIME_S = 3600
"""Longer than a client's longest upload of one part."""

CALLER_BASE_URL: ContextVar[str] = ContextVar("REACHED", default="")
"""Where the caller whose request is answered found us; the app sets it, for each request."""


class SignedLinks:
    """Makes and reads them. They lead to `base_url` where that is https, else to where the caller found us, by a tunnel too."""

    def __init__(self, key: bytes, base_url: str, *, lifetime_s: float = LIFETIME_S) -> None:
        self._key = hmac.new(key, b"penstock links", sha256).digest()
        self._base_url = base_url.rstrip("/")
        self.lifetime_s = lifetime_s

    @property
    def base(self) -> str:
        """Where the caller whose request is answered finds us."""
        return self._base_url if self._base_url.startswith("https:") else CALLER_BASE_URL.get() or self._base_url

    def make(self, what: str, **facts: Any) -> str:
        """A URL for the route `/api/cli/links/<what>/{token}`, which is told these facts and no others."""
        told = orjson.dumps({"what": what, "until": time.time() + self.lifetime_s, "facts": facts})
        return f"{self.base}{PATH}/{what}/{_encode(told)}.{self._sign(told)}"

    def read(self, what: str, token: str) -> dict[str, Any]:
        """The facts of a link; ControllerError 403 for one that is over, or that this controller did not make for `what`."""
        told_text, _, signature = token.partition(".")
        told = _decode(told_text)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign(told).encode()):
            raise _invalid_link("this link is not one of this controller's; ask for a new one", "LINK_INVALID")
        found: dict[str, Any] = orjson.loads(told)
        if found["what"] != what:
            raise _invalid_link("this link was made for something else; ask for a new one", "LINK_INVALID")
        if found["until"] < time.time():
            raise _invalid_link("this link is over; ask for a new one", "LINK_EXPIRED")
        return found["facts"]

    def _sign(self, told: bytes) -> str:
        return hmac.new(self._key, told, sha256).hexdigest()


def _encode(told: bytes) -> str:
    return urlsafe_b64encode(told).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        return b""


def _invalid_link(message: str, code: str) -> ControllerError:
    return ControllerError(message, code=code, status=403)
