"""The socket that a gateway listens on, its URLs and its host names."""

import socket
from collections.abc import Collection
from ipaddress import ip_address

from penstock.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
ANYWHERE = frozenset({"0.0.0.0", "::", ""})


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only if the protocol is named
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        why = f"the gateway cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError(f"{why}; set gateway.port to another port, or to 0 for a free one") from error
    return bound


def base_url(host: str, port: int, names: Collection[str] = ()) -> str:
    """Return the base URL of the OpenAI routes. A server on all interfaces uses the first of `names`, or 127.0.0.1."""
    if host in ANYWHERE:
        host = next(iter(names), "127.0.0.1")
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def root_url(url: str, host_header: str) -> str:
    """Return the URL without `/v1`, with the host that the caller used if given: that one is reachable for it."""
    return f"http://{host_header}" if host_header else url.removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable from this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def known_names(host: str, others: Collection[str]) -> frozenset[str] | None:
    """Return the host names that clients may use; None (any name) if `host` is not this machine's own and `others` is empty."""
    if is_loopback(host) or others:
        return LOOPBACK | {name.lower() for name in (host, *others)}
    return None
