"""The socket that a gateway listens on, its URLs and its host names."""

import re
import socket
from collections.abc import Collection
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address, ip_address

from penstock.errors import ConfigError

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
ANYWHERE = frozenset({"0.0.0.0", "::", ""})
_HOST = re.compile(r"(?:([A-Za-z0-9._-]{1,255})|\[([0-9A-Fa-f:.]{2,45})\])(?::([0-9]{1,5}))?", re.ASCII)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound but does not listen yet. Several processes can bind the same port with `shared`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only if the protocol is named
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
    """Return the base URL of the OpenAI routes. A server on all interfaces uses the first of `names`, or 127.0.0.1."""
    if host in ANYWHERE:
        host = next(iter(names), "127.0.0.1")
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def root_url(url: str, host_header: str) -> str:
    """Return the URL without `/v1`, with the host that the caller used if given: that one is reachable for it."""
    return f"http://{host_header}" if host_header else url.removesuffix("/v1")


@lru_cache(maxsize=64)
def host_name(host_header: str) -> str:
    """Return the name or address in a Host header, in lower case; empty if the header is malformed."""
    matched = _HOST.fullmatch(host_header)
    if matched is None or int(matched[3] or 0) > 65535:
        return ""
    if matched[1]:
        return matched[1].lower()
    try:
        return str(IPv6Address(matched[2]))
    except AddressValueError:
        return ""


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
