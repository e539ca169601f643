"""What a serving process is told to do, and the socket that it serves on."""

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError
from penstock.http.listen import bind

HOST = "127.0.0.1"

ServingEngine = Literal["embedded", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a process is to serve."""

    name: str
    """What callers name the model by."""
    folder: str
    token: str
    port: int = 0
    """Where it served before; another one is taken where that is not free."""
    engine: ServingEngine = "embedded"


def bound(port: int) -> socket.socket:
    """The port of before, so that its address stays; else a free one."""
    with suppress(ConfigError):
        return bind(HOST, port)
    return bind(HOST, 0)
