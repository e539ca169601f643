"""The controller on a socket."""

import socket
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from penstock.controller.api.app import make_app
from penstock.controller.stations import Controller
from penstock.errors import ConfigError
from penstock.http.listen import base_url as url_of
from penstock.http.listen import bind, known_names
from penstock.http.server import HttpServer

LAST_BYTES_S = 2.0
"""How long a stopped controller lets callers take the answers that are written."""
READER_S = 60.0
"""How long a caller may take nothing of its answer before it is cut off."""


@asynccontextmanager
async def serving(
    controller: Controller, *, host: str = "127.0.0.1", port: int = 0, base_url: str = "", names: Collection[str] = ()
) -> AsyncGenerator[str]:
    """Serve until this is left; yields the address for callers on this machine.

    `base_url` is how callers reach it where that is another, such as https://… of a proxy. `names` are further ones that it may be
    called by; on an interface other than this machine's own, without any, every name is taken: the token is what counts.
    """
    outside = urlsplit(base_url).hostname if base_url.startswith(("http://", "https://")) else None
    if base_url and not outside:
        raise ConfigError(f"base URL {base_url!r}: write it as https://name, or http://name:port")
    with _bound(host, port) as bound:
        here = url_of(host, bound.getsockname()[1]).removesuffix("/v1")
        known = known_names(host, [*names, outside] if outside else names)
        app = make_app(controller, base_url or here, names=known)
        async with HttpServer(app, bound, drain_s=LAST_BYTES_S, reader_s=READER_S):
            yield here


def _bound(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except ConfigError as error:
        why = f"the controller cannot listen on {host}:{port}: {error.__cause__}"
        raise ConfigError(f"{why}; choose another port, or 0 for a free one") from error
