"""`penstock eval|train logs`: the log of a submitted run, once or until the run is over."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.interrupts import INTERRUPTED
from penstock.cli.local_runs import find_run, log_lines
from penstock.cli.output import AsJson, Plain, check_format, local_time, print_result, warn
from penstock.errors import ConfigError, ControllerError
from penstock.run.folder import RunFolder

if TYPE_CHECKING:
    from penstock.controller.client import ControllerClient
    from penstock.controller.runs import RunKind

RUN_KEYS: dict["RunKind", str] = {"eval": "eval_run", "train": "training_run"}
"""The key of the run in what a controller answers about one."""
KIND_NAMES: dict["RunKind", str] = {"eval": "evaluation", "train": "training run"}
POLL_S = 0.5
RECONNECT_S = 300.0
"""How long to wait for a controller that went away."""
PAGE = 200
FINAL_STATUSES = frozenset({"finished", "failed", "stopped"})


def add_logs_command(app: typer.Typer, kind: "RunKind") -> None:
    """Add `logs` to the group of this kind."""
    word = "an evaluation" if kind == "eval" else "a training run"

    def logs(
        name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name or id.")],
        follow: Annotated[bool, typer.Option("-f", "--follow", help="From the beginning until the run is over.")] = False,
        limit: Annotated[
            int | None, typer.Option(min=1, max=200, help="The most lines to print; the newest 50 by default.")
        ] = None,
        cursor: Annotated[str | None, typer.Option(help="Older lines, from where the page before ended.")] = None,
        plain: Plain = False,
        as_json: AsJson = False,
    ) -> None:
        if follow and (limit is not None or cursor is not None):
            raise ConfigError("-f prints everything; it goes without --limit and --cursor")
        check_format(as_json=as_json, plain=plain)
        line = _as_json if as_json else _as_row if plain else _as_line
        known = find_run(kind, name)
        if isinstance(known, RunFolder):
            _print_local(known, None if follow else limit or 50, as_json=as_json)
        elif follow:
            _follow(kind, name, lambda entry: typer.echo(line(entry)), as_json=as_json)
        else:
            _page(kind, name, limit or 50, cursor, line, as_json=as_json)

    text = (
        f"Print what {word} says. With -f until it is over (exit code 1 unless it is finished); --json is then one object a line."
    )
    app.command("logs", help=text)(logs)


def _print_local(run: RunFolder, limit: int | None, *, as_json: bool) -> None:
    lines = list(log_lines(run))
    shown = lines[-limit:] if limit else lines
    typer.echo(orjson.dumps({"folder": str(run.path), "lines": shown}).decode() if as_json else "\n".join(shown))


def _page(kind: "RunKind", name: str, limit: int, cursor: str | None, line: Callable[[Any], str], *, as_json: bool) -> None:
    from penstock.cli.connection import connect

    page = connect().logs(kind, name, limit=limit, cursor=cursor)
    if as_json:
        print_result(page, "", as_json=True)
        return
    for entry in page["logs"]:
        typer.echo(line(entry))
    if not page["logs"]:
        typer.echo(f"nothing was said yet; see: penstock {kind} info {name}", err=True)
    elif page.get("next_cursor"):
        typer.echo(f"older lines: penstock {kind} logs {name} --cursor {page['next_cursor']}", err=True)


def _follow(kind: "RunKind", name: str, write: Callable[[Any], None], *, as_json: bool) -> None:
    from penstock.cli.connection import connect

    try:
        run = _print_until_over(ReconnectingClient(connect), kind, name, write)
    except KeyboardInterrupt:
        warn(f"the run goes on; to stop it: penstock {kind} stop {name}")
        raise typer.Exit(INTERRUPTED) from None
    why = f": {run['message']}" if run.get("message") else ""
    if as_json:
        typer.echo(orjson.dumps({"name": run["name"], "status": run["status"], "message": run.get("message") or ""}).decode())
    else:
        warn(f"{KIND_NAMES[kind]} {run['name']} is {run['status']}{why}; see: penstock {kind} info {run['name']}")
    if run["status"] != "finished":
        raise typer.Exit(1)


def _print_until_over(client: "ReconnectingClient", kind: "RunKind", name: str, write: Callable[[Any], None]) -> dict[str, Any]:
    """Write every entry once, in order; returns the run as it is in the end."""
    cursor: str | None = None
    while True:
        # The status is read before the page: then a page that is read after the run's end is known to have its last lines.
        run = client.call(lambda connected: connected.run(kind, name))[RUN_KEYS[kind]]
        last = cursor
        page = client.call(lambda connected: connected.logs(kind, run["id"], limit=PAGE, cursor=last, direction="newer"))  # noqa: B023
        for entry in page["logs"]:
            write(entry)
        cursor = page.get("next_cursor") or cursor
        if page["logs"]:
            continue
        if run["status"] in FINAL_STATUSES:
            return run
        time.sleep(POLL_S)


class ReconnectingClient:
    """Repeats a call after the controller was away: it may be started again, at another address too."""

    def __init__(self, connect: "Callable[[], ControllerClient]") -> None:
        self._connect, self._client = connect, connect()

    def call(self, request: "Callable[[ControllerClient], dict[str, Any]]") -> dict[str, Any]:
        deadline = time.monotonic() + RECONNECT_S
        warned = False
        while True:
            try:
                return request(self._client)
            except ControllerError as error:
                if not _is_transient(error) or time.monotonic() > deadline:
                    raise
                if not warned:
                    warn(f"{error}; waiting for it")
                warned = True
            time.sleep(POLL_S)
            self._reconnect()

    def _reconnect(self) -> None:
        try:
            self._client = self._connect()
        except ControllerError as error:
            if not _is_transient(error):
                raise


def _is_transient(error: ControllerError) -> bool:
    return error.status is None or error.status >= 500


def _as_json(entry: Any) -> str:
    return orjson.dumps(entry).decode()


def _as_row(entry: Any) -> str:
    cells = (entry.get(key) or "" for key in ("timestamp", "level", "step", "message"))
    return "\t".join(" ".join(str(cell).split()) for cell in cells)


def _as_line(entry: Any) -> str:
    step = f"[{entry['step']}] " if entry.get("step") else ""
    level = f"{str(entry['level']).upper()} " if str(entry.get("level", "info")).lower() not in ("info", "") else ""
    return f"{local_time(entry.get('timestamp'))[11:]} {level}{step}{entry.get('message', '')}".rstrip()
