"""The Ray cluster of a run: started on this machine for the run, or one that is running already; and its nodes."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from penstock.errors import ConfigError
from penstock.scale.package import NodeAffinitySchedulingStrategy, RayError, ray

STORE_BYTES = 128 << 20
"""Least memory of a local cluster's object store: jobs and answers are small, weights come on top."""
CONNECT_S = 2.0
PROBE_TIMEOUT_S = 120.0
REFUSED_CODE = 3
PROBE_PROGRAM = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    sys.exit(int(sys.argv[2]))
"""
"""A program that has no token and asks the cluster at its first argument for anything at all."""


@contextmanager
def open_cluster(address: str, *, namespace: str, store_bytes: int = STORE_BYTES) -> Generator[None]:
    """Be connected to the cluster at `address`, or to a new one on this machine where it is empty, which ends with this.

    One that this process is connected to already is used as it is. ConfigError where it cannot be reached, or where it has several
    machines and asks nobody for a token. Blocks for seconds, and must run in the main thread: Ray ends a local cluster with the
    thread that started it.
    """
    if address.startswith("ray://"):
        raise ConfigError(f"{address!r} is Ray Client's: penstock must run on a machine of the cluster; start it there with 'auto'")
    if ray.is_initialized():
        yield
        return
    with _keep_sigterm():
        _connect(address, namespace, store_bytes)
    try:
        refuse_open_cluster()
        yield
    finally:
        ray.shutdown()


def live_nodes() -> list[dict[str, Any]]:
    """The machines of the cluster, as Ray describes them."""
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    return [node for node in nodes if node["Alive"]]


def own_node_id() -> str:
    """The id of the node that this process is on."""
    return ray.get_runtime_context().get_node_id()


def own_node() -> dict[str, Any]:
    """The machine that this process is on."""
    return next(node for node in live_nodes() if node["NodeID"] == own_node_id())


def on_node(node_id: str) -> Any:
    """Where to schedule what must be on that node."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def refuse_open_cluster() -> None:
    """Several machines without a token between them would run anyone's code: ConfigError.

    Our own token proves nothing, since a cluster that asks for none lets us in too; so a program without a token tries to connect.
    """
    nodes, address = live_nodes(), cast("str", ray.get_runtime_context().gcs_address)
    if len(nodes) > 1 and not _requires_token(address):
        raise ConfigError(
            f"the Ray cluster has {len(nodes)} nodes and lets in whoever reaches it; start every node and this command with "
            "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN (`ray get-auth-token --generate` makes one)"
        )


async def reachable_url(base_url: str, *, several_nodes: bool) -> str:
    """The gateway's URL as workers on all nodes can use it: loopback becomes this node's own address where there are several.

    ConfigError where the gateway does not listen there.
    """
    parts = urlsplit(base_url)
    if not several_nodes or not is_loopback(parts.hostname or ""):
        return base_url
    own: str = own_node()["NodeManagerAddress"]
    if is_loopback(own) or not await asyncio.to_thread(_listens, own, parts.port or 80):
        raise ConfigError(
            f"the Ray cluster has several nodes, and the gateway at {parts.netloc} cannot be reached from the others; "
            f'set gateway.host = "0.0.0.0", and gateway.hosts = ["{own}"] to be called by that name alone'
        )
    return urlunsplit(parts._replace(netloc=f"[{own}]:{parts.port}" if ":" in own else f"{own}:{parts.port}"))


def is_loopback(host: str) -> bool:
    """Whether `host` means the caller's own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _requires_token(address: str) -> bool:
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    command = [sys.executable, "-c", PROBE_PROGRAM, address, str(REFUSED_CODE)]
    done = subprocess.run(command, env=others | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, timeout=PROBE_TIMEOUT_S)
    return done.returncode == REFUSED_CODE


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_S):
        return True
    return False


def _connect(address: str, namespace: str, store_bytes: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)  # our own events report its state
    quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address, **quiet)
        else:
            ray.init("local", include_dashboard=False, object_store_memory=max(store_bytes, STORE_BYTES), **quiet)
    except (ConnectionError, RuntimeError, ValueError, RayError) as cause:
        first = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        what = f"no Ray cluster can be reached at {address!r}" if address else "no Ray cluster can be started on this machine"
        raise ConfigError(f"{what}: {first}") from cause


@contextmanager
def _keep_sigterm() -> Generator[None]:
    """Ray replaces the SIGTERM handler; restore the one before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
