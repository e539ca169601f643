"""Which URLs of a request may be called: web addresses of hosts that whoever started the server has named, and no others."""

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.http.listen import LOOPBACK

LONGEST_URL = 4096


class Hosts:
    """A list of hosts: `name`, `name:port`, `*.name` for what is below it, an address, or a network such as `10.0.0.0/8`."""

    def __init__(self, allowed: Iterable[str] = LOOPBACK) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in allowed:
            self._add(entry.strip().lower())

    def refusal(self, url: str) -> str | None:
        """Why `url` may not be called, as half a sentence with what to do; None where it may."""
        if len(url) > LONGEST_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            return f"is no URL: use up to {LONGEST_URL} plain ASCII characters"
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            return f"is no URL: {error}"
        if parts.scheme not in ("http", "https") or not host:
            return "must be an http:// or https:// URL with a host"
        if "@" in parts.netloc:
            return "must not hold a user or password; send a key in controller_api_key"
        if parts.fragment:
            return "must not hold a fragment"
        if self._allows(host, port or (443 if parts.scheme == "https" else 80)):
            return None
        return f"names the host {host}, which this server may not call; start it with that host among PENSTOCK_ROLLOUT_HOSTS"

    def _add(self, entry: str) -> None:
        if "/" in entry and "://" not in entry:
            try:
                self._networks.append(ipaddress.ip_network(entry))
                return
            except ValueError as cause:
                raise ConfigError(f"hosts: {entry!r} is no network: {cause}; write one as 10.0.0.0/8") from cause
        if not entry or "/" in entry or "@" in entry or "*" in entry.removeprefix("*."):
            raise ConfigError(f"hosts: {entry!r} is no host; write a name, name:port, *.name, an address or a network")
        self._names.add(entry.removeprefix("[").removesuffix("]"))

    def _allows(self, host: str, port: int) -> bool:
        parents = {f"*.{host.split('.', dots)[-1]}" for dots in range(1, host.count(".") + 1)}
        if not self._names.isdisjoint({host, f"{host}:{port}", f"[{host}]:{port}", *parents}):
            return True
        with suppress(ValueError):
            address = ipaddress.ip_address(host)
            return any(address in network for network in self._networks)
        return False
