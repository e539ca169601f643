"""`penstock view`: the dashboard in a browser."""

import asyncio
import secrets
import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import orjson
import typer

from penstock.cli.output import warn
from penstock.system.async_tools import INTERRUPTED, Interrupts

if TYPE_CHECKING:
    from penstock.view.sources import FolderSource

PORT = 7717


def view(
    place: Annotated[
        str, typer.Argument(metavar="[RUN|FOLDER|URL]", help="A run folder, a folder of runs, or the address of a controller.")
    ] = "runs",
    export: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the run as one page and serve nothing.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a recorded run that comes with penstock.")] = False,
    host: Annotated[
        str, typer.Option(help="The interface to listen on; another one than this machine's own asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    names: Annotated[list[str] | None, typer.Option("--name", metavar="HOST", help="A name that browsers may use for it.")] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Say nothing but JSON, errors too.")] = False,
) -> None:
    """Show runs, groups, rollouts and tokens in a browser, live. Reads only, and works after a crash and on a copy."""
    if place.startswith(("http://", "https://")):
        raise typer.Exit(_open_controller(place, browser=browser, as_json=as_json))
    if export is not None:
        from penstock.view.export import export_run

        written = export_run(Path(place), export)
        typer.echo(orjson.dumps({"page": str(written)}).decode() if as_json else str(written))
        return
    from penstock.view.demo import demo_folder
    from penstock.view.sources import FolderSource

    with demo_folder() if demo else nullcontext(Path(place)) as folder:
        code = _serve(FolderSource(folder), host, port, names or [], browser=browser)
    raise typer.Exit(code)


def _open_controller(address: str, *, browser: bool, as_json: bool) -> int:
    url = address.rstrip("/") + "/view/"
    typer.echo(orjson.dumps({"url": url}).decode() if as_json else url)
    if browser:
        _open_browser(url)
    return 0


def _serve(source: "FolderSource", host: str, port: int, names: list[str], *, browser: bool) -> int:
    """Serve until a signal comes and return the exit code. A line of JSON on stdout says where."""
    from penstock.http.listen import is_loopback

    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    try:
        first = asyncio.run(_run(source, host, port, names, token=token, browser=browser))
    except asyncio.CancelledError:
        first = signal.SIGINT
    return INTERRUPTED if first == signal.SIGINT else 0


async def _run(source: "FolderSource", host: str, port: int, names: list[str], *, token: str, browser: bool) -> int | None:
    from penstock.view.app import serve_view

    stop = asyncio.Event()
    with Interrupts(stop, lambda: None) as interrupts:
        async with serve_view(source, host=host, port=port, names=names, token=token) as url:
            page = f"{url}#/run/{quote(source.only, safe='')}" if source.only else url
            typer.echo(orjson.dumps({"event": "ready", "url": page, **({"token": token} if token else {})}).decode())
            warn(f"the dashboard is at {page}" + ("; paste the token above into it" if token else "") + "; Ctrl-C stops it")
            if browser:
                _open_browser(page)
            await stop.wait()
        return interrupts.first


def _open_browser(url: str) -> None:
    """Open a browser where there is one; without, the address was printed."""
    import webbrowser

    with suppress(webbrowser.Error, OSError):
        webbrowser.open(url)


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="For example runs/multiply.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the path as JSON.")] = False,
) -> None:
    """Write report.html into a run folder: curves, groups and rollouts."""
    import orjson

    from penstock.view.export import write_report

    path = write_report(folder)
    typer.echo(orjson.dumps({"report": str(path)}).decode() if as_json else str(path))
