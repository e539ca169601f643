"""The socket that a gateway listens on, and what it is called there."""

import socket
from collections.abc import Collection
from ipaddress import ip_address

from penstock.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
ANYWHERE = frozenset({"0.0.0.0", "::", ""})


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket; nobody is served before something listens on it. A `shared` one may be bound by several processes of ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only where this is named
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        why = f"the gateway cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError(f"{why}; set gateway.port to another port, or to 0 for a free one") from error
    return bound


def base_url(host: str, port: int, names: Collection[str] = ()) -> str:
    """Where clients find the OpenAI routes; a server on every interface goes by the first of its names."""
    if host in ANYWHERE:
        host = next(iter(names), "127.0.0.1")
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def root_url(url: str, host_header: str) -> str:
    """Without `/v1`, and by the name that a caller used, which is right for it wherever it is."""
    return f"http://{host_header}" if host_header else url.removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def known_names(host: str, others: Collection[str]) -> frozenset[str] | None:
    """What clients may call us; any name where we listen on every interface and none is given."""
    if host in LOOPBACK or others:
        return LOOPBACK | {host, *others}
    return None
