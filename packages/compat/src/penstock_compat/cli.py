"""`penstock rollout serve`: an agent behind HTTP, for controllers anywhere."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from penstock.cli.output import warn
from penstock.config import rollout_token, secret
from penstock.errors import ConfigError
from penstock.system.async_tools import INTERRUPTED, Interrupts

if TYPE_CHECKING:
    from starlette.applications import Starlette

TokenEnv = Annotated[str, typer.Option(metavar="NAME", help="The environment variable with the token that callers must show.")]
HostsList = Annotated[str, typer.Option(metavar="A,B,…", help="Hosts that may be called for models and callbacks; this machine's.")]


def add_commands(root: typer.Typer, groups: dict[str, typer.Typer]) -> None:
    """Adds the commands of this wheel to `penstock`."""
    groups["rollout"].command()(serve)


def serve(
    entry: Annotated[Path, typer.Argument(help="The file that holds the workflow and the grader.")],
    host: Annotated[str, typer.Option(help="The interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_env: TokenEnv = "PENSTOCK_ROLLOUT_TOKEN",
    hosts: HostsList = "",
    journal: Annotated[Path, typer.Option(help="Where what was accepted is kept.")] = Path(".penstock/rollouts.db"),
    max_accepted: Annotated[int, typer.Option(min=1, help="Rollouts that may be accepted and not over.")] = 1000,
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds that running rollouts have when it stops.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Say nothing but JSON, errors too.")] = False,
) -> None:
    """Serve the agent in ENTRY: POST /rollout runs it, and callbacks report the result.

    Prints one line of JSON once it serves. SIGTERM or Ctrl-C stop it: rollouts that run may end first (--drain-s), those that wait
    are run when it is started again.
    """
    token = _token(token_env, host)
    with _bind(host, port) as sock:
        server = _make_server(entry, token, hosts, journal, max_accepted, drain_s, quiet=as_json)
        ready = {"event": "ready", "url": _url(host, sock), "agent": str(entry), "journal": str(journal), "pid": os.getpid()}
        try:
            first = asyncio.run(_serve(server, sock, ready, drain_s=drain_s, quiet=as_json))
        except asyncio.CancelledError:
            first = signal.SIGINT
    raise typer.Exit(INTERRUPTED if first == signal.SIGINT else 0)


def _token(variable: str, host: str) -> str | None:
    from penstock.http.listen import LOOPBACK

    token = rollout_token() if variable == "PENSTOCK_ROLLOUT_TOKEN" else secret(variable, "--token-env")
    if token is None and host not in LOOPBACK:
        raise ConfigError(f"--host {host} serves other machines, which must show a token: set {variable} to a long random one")
    return token


def _bind(host: str, port: int) -> socket.socket:
    from penstock.http.listen import bind

    try:
        return bind(host, port)
    except ConfigError as cause:
        text = f"the rollout server cannot listen on {host}:{port}: {cause.__cause__}"
        raise ConfigError(f"{text}; give another --port, or 0 for a free one") from cause


def _make_server(
    entry: Path, token: str | None, hosts: str, journal: Path, max_accepted: int, drain_s: float, *, quiet: bool
) -> "Starlette":
    """Make the server of the agent, after its file was tried in another process."""
    from penstock.config import AgentSection
    from penstock.run.inputs import preflight
    from penstock.sdk.discovery import load_agent
    from penstock_compat.rollout_server.app import create_rollout_server
    from penstock_compat.rollout_server.backend import LocalBackend
    from penstock_compat.rollout_server.rollouts import ServerLimits

    preflight(AgentSection(entry=entry), {}, {})
    agent = load_agent(entry, {}, {})
    backend = LocalBackend(
        workflow=agent.workflow,
        workflow_config=agent.workflow_config,
        grader=agent.grader,
        grader_config=agent.grader_config,
        artifacts=journal.parent / "artifacts",
    )
    return create_rollout_server(
        backend=backend,
        token=token,
        hosts=[name.strip() for name in hosts.split(",") if name.strip()] or None,
        journal=journal,
        limits=ServerLimits(max_accepted=max_accepted, drain_s=drain_s),
        configure_logging=not quiet,
    )


def _url(host: str, sock: socket.socket) -> str:
    from penstock.http.listen import base_url

    return base_url(host, sock.getsockname()[1]).removesuffix("/v1")


async def _serve(
    server: "Starlette", sock: socket.socket, ready: Mapping[str, str | int], *, drain_s: float, quiet: bool
) -> int | None:
    """Serve until a signal comes; returns its number."""
    from penstock_compat.rollout_server.app import serving

    notify: Callable[[str], None] = (lambda _: None) if quiet else warn
    stop = asyncio.Event()
    with Interrupts(
        stop, lambda: notify(f"stopping: rollouts that run have {drain_s:g} s; Ctrl-C again quits at once")
    ) as interrupts:
        async with serving(server, sock):
            typer.echo(orjson.dumps(ready).decode())
            notify(f"serving {ready['agent']} at {ready['url']}, journal in {ready['journal']}")
            await stop.wait()
        return interrupts.first
