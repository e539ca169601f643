"""`penstock controller`: the service that executes submitted runs, and how to reach it."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
import typer

from penstock.cli.output import All, AsJson, Limit, Plain, TableColumn, labelled_lines, local_time, print_result, print_table, warn
from penstock.errors import ConfigError, ControllerError
from penstock.system.async_tools import INTERRUPTED, Interrupts
from penstock_controller.cli.connection import PANEL, connect, fetch_page

if TYPE_CHECKING:
    from penstock.system.sandbox import SandboxWish
    from penstock_controller.home import Home

PORT = 8470
DOWN_S = 60.0

app = typer.Typer(help="The service that executes submitted runs.", no_args_is_help=True, rich_help_panel=PANEL)

DEVICE_COLUMNS = (
    TableColumn("id", lambda row: row.get("id")),
    TableColumn("device", lambda row: row.get("device_name")),
    TableColumn("person", lambda row: row.get("person")),
    TableColumn("since", lambda row: local_time(row.get("created_at"))),
    TableColumn("until", lambda row: local_time(row.get("expires_at"))),
)
HomeOption = Annotated[Path | None, typer.Option("--home", help="Its folder; else $PENSTOCK_HOME, else the user's state folder.")]


@app.command()
def up(
    host: Annotated[str, typer.Option(help="The interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    runs: Annotated[int, typer.Option(min=1, help="Runs to execute in parallel.")] = 1,
    home: HomeOption = None,
    url: Annotated[str, typer.Option(help="Where others reach it, such as https://HOST behind a proxy.")] = "",
    names: Annotated[list[str] | None, typer.Option("--name", metavar="HOST", help="A name that callers may use for it.")] = None,
    keyring: Annotated[
        bool, typer.Option("--keyring", help="Keep the key of secrets in the operating system's keyring from now on.")
    ] = False,
    sandbox: Annotated[
        Literal["auto", "bubblewrap", "off"],
        typer.Option(help="For submitted code; auto takes bubblewrap where the machine allows it."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON, errors too.")] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Prints one line of JSON when ready. Active runs continue without it.

    Commands that need a controller start one in the background; use this for one that other machines use.
    """
    place = _home(home).create()
    if keyring:
        from penstock_controller.vault import use_keyring

        use_keyring(place)
    try:
        first = asyncio.run(_serve(place, host, port, runs, url, names or [], sandbox, quiet=as_json))
    except asyncio.CancelledError:
        first = signal.SIGINT
    raise typer.Exit(INTERRUPTED if first == signal.SIGINT else 0)


@app.command()
def status(home: HomeOption = None, as_json: AsJson = False) -> None:
    """Show the running controller's address and its runs; exit code 1 if none is running."""
    from penstock_controller.client import ControllerClient
    from penstock_controller.local import find_running, named_controller

    place = _home(home)
    named = named_controller() if home is None else None
    address = find_running(place) if named is None and place.path.is_dir() else None
    if named is None and address is None:
        text = f"No controller serves {place.path}.\n\n  next  penstock controller up, or any command that needs one"
        print_result({"running": False, "home": str(place.path)}, text, as_json=as_json)
        raise typer.Exit(1)
    client = named or ControllerClient(address.url if address else "", place.token())
    account = client.verify()
    found: dict[str, Any] = {
        "running": True,
        "url": client.url,
        "user": account["user"]["name"],
        "isolation": account.get("isolation"),
    }
    if address is not None:
        found |= {"pid": address.pid, "home": str(place.path), "log": str(place.log)}
    found["runs"] = {kind: client.runs(kind, limit=1)["total_count"] for kind in ("eval", "train")}
    shown = [*((key, found.get(key)) for key in ("url", "pid", "home", "log"))]
    counted = [("evaluations", found["runs"]["eval"]), ("training runs", found["runs"]["train"])]
    last = [("isolation", found["isolation"])] if found["isolation"] else []
    print_result(found, f"A controller serves.\n\n{labelled_lines([*shown, *counted, *last])}", as_json=as_json)


@app.command()
def down(home: HomeOption = None, as_json: AsJson = False) -> None:
    """Stop this machine's controller. Active runs continue; the next controller records how they ended."""
    from penstock_controller.local import find_running, is_unserved

    place = _home(home)
    address = find_running(place) if place.path.is_dir() else None
    if address is None:
        raise ControllerError(f"no controller serves {place.path}; nothing was stopped", code="CONTROLLER_ABSENT", status=404)
    os.kill(address.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S
    while not is_unserved(place):
        if time.monotonic() > deadline:
            text = f"the controller (process {address.pid}) does not stop; see {place.log}"
            raise ControllerError(text, code="CONTROLLER_STUCK")
        time.sleep(0.05)
    text = f"Stopped the controller of {place.path}. Active runs continue.\n\n  next  penstock controller up"
    print_result({"stopped": True, "pid": address.pid, "home": str(place.path)}, text, as_json=as_json)


@app.command()
def register(
    path: Annotated[Path, typer.Argument(help="A repository or workspace on the controller's machine.")] = Path(),
    name: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Its name; by default that of its origin.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register a repository as OWNER/NAME, for submissions without code."""
    from penstock_controller.submit import repository_name

    chosen = name or repository_name(path)
    if chosen is None:
        raise ConfigError(f"{path} has no remote called origin to take a name from; give one: --name OWNER/NAME")
    record = connect().register_repository(chosen, path.resolve())
    print_result(record, f"{record['name']} now stands for {record['path']}.", as_json=as_json)


@app.command()
def approve(
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code that the device shows.")],
    person: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose device it is; a person's devices share secrets. Without a name, it shares none."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Approve a device that asks to log in; run this on the controller's machine."""
    record = connect().approve(code, person=person)
    whose = f", a device of {record['person']}'s," if record.get("person") else ""
    print_result(
        record,
        f"Let {record.get('device_name') or 'the device'}{whose} in.\n\n  {record.get('isolation', '')}".rstrip(),
        as_json=as_json,
    )


@app.command()
def devices(limit: Limit = 20, everything: All = False, plain: Plain = False, as_json: AsJson = False) -> None:
    """List the approved devices: all of them on the controller's machine, only yours elsewhere."""
    client = connect()
    page = fetch_page(lambda limit, offset: client.tokens(limit=limit, offset=offset), "tokens", limit, everything=everything)
    print_table(page, "tokens", DEVICE_COLUMNS, as_json=as_json, plain=plain, empty="no device was approved")


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="See: penstock controller devices.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a device's token."""
    record = connect().revoke(token_id)
    print_result(record, f"Revoked the token of device {token_id}.", as_json=as_json)


@app.command()
def token(as_json: AsJson = False) -> None:
    """Print the variables to set to reach this controller with penstock or osmosis. Keep them secret: they grant full access."""
    client = connect()
    variables = {
        "PENSTOCK_CONTROLLER": client.url,
        "PENSTOCK_CONTROLLER_TOKEN": client.token or "",
        "OSMOSIS_PLATFORM_URL": client.url,
        "OSMOSIS_TOKEN": client.token or "",
    }
    text = "\n".join(f"export {name}={value}" for name, value in variables.items())
    print_result({"url": client.url, "token": client.token, "variables": variables}, text, as_json=as_json)


async def _serve(
    home: "Home", host: str, port: int, runs: int, url: str, names: list[str], sandbox: "SandboxWish", *, quiet: bool
) -> int | None:
    """Serve until a signal comes; returns its number."""
    from penstock.system.processes import protect_memory
    from penstock_controller.api.app import serve_controller
    from penstock_controller.context import ControllerLimits, open_controller
    from penstock_controller.isolation import describe_isolation
    from penstock_controller.local import publish_address

    protect_memory()

    notify: Callable[[str], None] = (lambda _: None) if quiet else warn
    stop = asyncio.Event()
    with Interrupts(stop, lambda: notify("stopping; active runs continue")) as interrupts:
        async with (
            open_controller(home, ControllerLimits(runs=runs), sandbox=sandbox) as controller,
            serve_controller(controller, host=host, port=port, base_url=url.rstrip("/"), names=names) as here,
        ):
            with publish_address(home, here) as address:
                isolation = describe_isolation(controller.sandbox)
                ready = {"event": "ready", "url": url.rstrip("/") or here, "pid": address.pid, "home": str(home.path)}
                ready |= {"sandbox": controller.sandbox.name, "isolation": isolation}
                typer.echo(orjson.dumps(ready).decode())
                notify(f"serving {home.path} at {ready['url']}; how to connect: penstock controller token")
                notify(isolation)
                await stop.wait()
        return interrupts.first


def _home(chosen: Path | None) -> "Home":
    from penstock_controller.home import Home, default_home

    return default_home() if chosen is None else Home(chosen.expanduser())
