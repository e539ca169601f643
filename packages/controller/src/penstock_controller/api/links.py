"""Signed links: URLs that grant access for a limited time, for clients that send no token with them.

A link is `/api/cli/links/<purpose>/<token>`. The app verifies the token of every request under `/api/cli/links/` before its route
runs, and puts the link's facts into `request.state.link`; so no route can forget to.
"""

import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import orjson

from penstock.errors import ControllerError
from penstock.system.files import check_key

PATH = "/api/cli/links"
LIFETIME_S = 3600
"""Longer than any single upload takes."""

CALLER_BASE_URL: ContextVar[str] = ContextVar("REACHED", default="")
"""Base URL that the current request's client used; set by the app for each request."""


class SignedLinks:
    """Creates and verifies links, to `base_url` if that is https, else to the URL that the client used, such as a tunnel's."""

    def __init__(self, key: bytes, base_url: str, *, lifetime_s: float = LIFETIME_S) -> None:
        check_key(key, "the key of links is damaged", "remove the file `links` and start the controller again")
        self._key = hmac.new(key, b"penstock links", sha256).digest()
        self._base_url = base_url.rstrip("/")
        self.lifetime_s = lifetime_s

    @property
    def is_proxied(self) -> bool:
        """Whether the controller knows the address of a proxy in front of it."""
        return self._base_url.startswith("https:")

    @property
    def base(self) -> str:
        """The base URL for the current request's client."""
        return self._base_url if self.is_proxied else CALLER_BASE_URL.get() or self._base_url

    def create(self, purpose: str, **facts: Any) -> str:
        """Returns a URL for the route `/api/cli/links/<purpose>/{token}`, which gets exactly these facts."""
        payload = orjson.dumps({"what": purpose, "until": time.time() + self.lifetime_s, "facts": facts})
        return f"{self.base}{PATH}/{purpose}/{_encode(payload)}.{self._sign(payload)}"

    def read(self, purpose: str, token: str) -> dict[str, Any]:
        """Returns the facts of a link; ControllerError 403 if it expired or was not created here for `purpose`."""
        encoded, _, signature = token.partition(".")
        payload = _decode(encoded)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign(payload).encode()):
            raise _invalid_link("this link is not one of this controller's; ask for a new one", "LINK_INVALID")
        found: dict[str, Any] = orjson.loads(payload)
        if found["what"] != purpose:
            raise _invalid_link("this link was made for something else; ask for a new one", "LINK_INVALID")
        if found["until"] < time.time():
            raise _invalid_link("this link is over; ask for a new one", "LINK_EXPIRED")
        return found["facts"]

    def _sign(self, payload: bytes) -> str:
        return hmac.new(self._key, payload, sha256).hexdigest()


def _encode(payload: bytes) -> str:
    return urlsafe_b64encode(payload).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        return b""


def _invalid_link(message: str, code: str) -> ControllerError:
    return ControllerError(message, code=code, status=403)
