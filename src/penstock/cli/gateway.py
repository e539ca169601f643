"""`penstock gateway`: a gateway that stands alone."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.output import stage_progress, warn
from penstock.errors import ConfigError
from penstock.system.async_tools import INTERRUPTED, Interrupts
from penstock.view.formatting import counts

if TYPE_CHECKING:
    from penstock.gateway.standalone import ModelFiles, Settings

Engine = Annotated[
    str, typer.Option(help="embedded, in this process; vllm or sglang, servers that --url names; openai or anthropic, an endpoint.")
]
Model = Annotated[str, typer.Option(help="As `penstock model pull` takes it.")]
Urls = Annotated[
    list[str] | None, typer.Option("--url", metavar="URL", help="Of a server or an endpoint; may be repeated for servers.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key of any section; may be repeated.")
]


def gateway(
    engine: Engine = "embedded",
    model: Model = "smollm2-135m",
    url: Urls = None,
    pool: Annotated[str, typer.Option(help="sqlite; or memory, which forgets.")] = "sqlite",
    folder: Annotated[Path, typer.Option(help="Where everything is recorded.")] = Path("runs/gateway"),
    host: Annotated[str, typer.Option(help="The interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Only 1; for more, run several gateways on PostgreSQL.")] = 1,
    otel: Annotated[bool, typer.Option("--otel", help="Report every call to OpenTelemetry.")] = False,
    is_open: Annotated[bool, typer.Option("--open", help="Ask for no tokens; on this machine only.")] = False,
    sessions: Annotated[
        bool, typer.Option("--sessions", help="Give out a key under which each session id of a client is a rollout.")
    ] = False,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say nothing but JSON, errors too.")] = False,
) -> None:
    """Serve a model to agents anywhere, and record every call.

    Prints one line of JSON once it serves. SIGTERM or Ctrl-C stop it: calls under way may end first (gateway.drain_s).
    """
    if workers > 1:
        text = "--workers: a gateway is one process; to use more cores, run several gateways with one PostgreSQL pool"
        raise ConfigError(f"{text}: --pool postgres --set pool.url=…")
    sections = {"pool": {"name": pool}, "gateway": {"host": host, "port": port} | ({"otel": True} if otel else {})}
    settings = make_settings(engine, model, url or [], overrides or [], sections)
    raise typer.Exit(serve(settings, folder=folder, is_open=is_open, sessions=sessions, quiet=as_json))


def serve(settings: "Settings", *, folder: Path, is_open: bool = False, sessions: bool = False, quiet: bool = False) -> int:
    """Serve until a signal comes and return the exit code. A line of JSON on stdout says when it serves, and where."""
    from penstock.gateway.standalone import hold_folder, load_secret, make_folder, write_tokens
    from penstock.http.listen import bind

    if is_open:
        check_open_host(settings)
    place = settings.gateway
    with bind(place.host, place.port) as sock:
        found = get_model(settings)
        make_folder(folder, settings, found)
        with hold_folder(folder):
            tokens = write_tokens(folder, load_secret(folder), sessions=sessions)
            notices = GatewayNotices(
                settings,
                found,
                folder=folder,
                port=sock.getsockname()[1],
                tokens=tokens,
                is_open=is_open,
                sessions=sessions,
                quiet=quiet,
            )
            try:
                first = asyncio.run(_serve(notices, sock))
            except asyncio.CancelledError:
                first = signal.SIGINT
    return INTERRUPTED if first == signal.SIGINT else 0


def make_settings(engine: str, model: str, urls: list[str], overrides: list[str], sections: dict[str, Any]) -> "Settings":
    """Settings from the options of a command line, checked."""
    from penstock.config import engine_section
    from penstock.gateway.standalone import read_settings

    section = engine_section(engine)
    if section.needs_url and not urls:
        raise ConfigError(f"--engine {engine} needs the address of a server: --url http://127.0.0.1:8000")
    if section.in_process and urls:
        raise ConfigError("--url names a server; add --engine vllm or --engine sglang")
    tree = {"model": {"name": model}, "engine": {"name": engine} | ({"url": urls} if urls else {}), **sections}
    return read_settings(tree, overrides)


def get_model(settings: "Settings") -> "ModelFiles":
    """The model's folder, pulled if it is not here. For servers a folder with a tokenizer is enough; endpoints need none."""
    from penstock.gateway.standalone import ModelFiles
    from penstock.models import find_cached, resolve

    name = settings.model.name
    if settings.engine.text_only:
        settings.engine.preflight(name)
        return ModelFiles(name, Path())
    path = Path(name).expanduser().resolve()
    if not settings.engine.in_process and (path / "tokenizer.json").is_file():
        return ModelFiles(path.name, path)
    if (found := find_cached(name)) is None:
        with stage_progress() as progress:
            found = resolve(name, progress)
    return ModelFiles(found.name, found.path)


def check_open_host(settings: "Settings") -> None:
    """ConfigError for an open gateway that other machines could reach."""
    from penstock.http.listen import is_loopback

    if not is_loopback(settings.gateway.host):
        raise ConfigError(
            f"--open: without tokens it may be reached from this machine only, not at {settings.gateway.host}; use --host 127.0.0.1"
        )


class GatewayNotices:
    """Prints that the gateway serves: a line of JSON for programs on stdout, text for people on stderr."""

    def __init__(
        self,
        settings: "Settings",
        model: "ModelFiles",
        *,
        folder: Path,
        port: int,
        tokens: Path,
        is_open: bool,
        sessions: bool,
        quiet: bool,
    ) -> None:
        from penstock.http.listen import base_url

        self.settings, self.model, self.folder, self.port = settings, model, folder, port
        self._base_url = base_url(settings.gateway.host, port, settings.gateway.hosts)
        self._tokens = tokens
        self.is_open, self.sessions = is_open, sessions
        self._quiet = quiet

    def announce(self, pid: int, **more: object) -> None:
        from penstock.http.listen import LOOPBACK

        line = {
            "event": "ready",
            "base_url": self._base_url,
            "anthropic_base_url": self._base_url.removesuffix("/v1"),
            "model": self.model.name,
            "engine": self.settings.engine.name,
            "pool": self.settings.pool.name,
            "folder": str(self.folder),
            "tokens": str(self._tokens),
            "mode": "open" if self.is_open else "token",
            "pid": pid,
        }
        typer.echo(orjson.dumps(line | more).decode())
        self.warn(f"serving {self.model.name} at {self._base_url}, recording into {self.folder}; tokens are in {self._tokens}")
        if self.is_open:
            self.warn("it is open: any program on this machine may call, grade and read without a token")
        if self.settings.gateway.host not in LOOPBACK:
            self.warn(
                f"it can be reached from other machines at {self.settings.gateway.host}: without TLS, but for none without a token"
            )

    def warn(self, text: str) -> None:
        if not self._quiet:
            warn(text)

    def announce_stop(self) -> None:
        self.warn(f"stopping: calls under way have {self.settings.gateway.drain_s:g} s; Ctrl-C again quits at once")


async def _serve(notices: GatewayNotices, sock: socket.socket) -> int | None:
    """Serve in this process until a signal comes; returns its number."""
    from penstock.gateway.standalone import load_secret, open_gateway

    stop, secret = asyncio.Event(), load_secret(notices.folder)
    with Interrupts(stop, notices.announce_stop) as interrupts:
        opening = open_gateway(
            notices.settings,
            notices.model,
            folder=notices.folder,
            secret=secret,
            sock=sock,
            is_open=notices.is_open,
            sessions=notices.sessions,
        )
        async with opening as opened:
            notices.announce(os.getpid(), workers=1)
            await stop.wait()
        if opened.gateway.counts:
            notices.warn(f"not done as asked: {counts(opened.gateway.counts)}")
        return interrupts.first
