"""`penstock eval|train logs`: what a submitted run says, once or until it is over."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.interrupts import INTERRUPTED
from penstock.cli.output import AsJson, Plain, show, when
from penstock.errors import ConfigError, ControllerError

if TYPE_CHECKING:
    from penstock.controller.client import ControllerClient
    from penstock.controller.runs import RunKind

POLL_S = 0.5
AWAY_S = 300.0
"""How long a controller that went away is waited for."""
PAGE = 200
OVER = frozenset({"finished", "failed", "stopped"})


def attach_logs(app: typer.Typer, kind: "RunKind") -> None:
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
        if plain and as_json:
            raise ConfigError("--json and --plain go without each other")
        line = _as_json if as_json else _as_row if plain else _as_line
        if follow:
            _follow(kind, name, lambda entry: typer.echo(line(entry)), as_json=as_json)
        else:
            _page(kind, name, limit or 50, cursor, line, as_json=as_json)

    text = (
        f"Print what {word} says. With -f until it is over (exit code 1 unless it is finished); --json is then one object a line."
    )
    app.command("logs", help=text)(logs)


def _page(kind: "RunKind", name: str, limit: int, cursor: str | None, line: Callable[[Any], str], *, as_json: bool) -> None:
    from penstock.cli.connection import connect

    page = connect().logs(kind, name, limit=limit, cursor=cursor)
    if as_json:
        show(page, "", as_json=True)
        return
    for entry in page["logs"]:
        typer.echo(line(entry))
    if not page["logs"]:
        typer.echo(f"nothing was said yet; see: penstock {kind} info {name}", err=True)
    elif page.get("next_cursor"):
        typer.echo(f"older lines: penstock {kind} logs {name} --cursor {page['next_cursor']}", err=True)


def _follow(kind: "RunKind", name: str, say: Callable[[Any], None], *, as_json: bool) -> None:
    from penstock.cli.connection import connect

    try:
        run = _until_over(_Held(connect, connect()), kind, name, say)
    except KeyboardInterrupt:
        typer.echo(f"penstock: the run goes on; to stop it: penstock {kind} stop {name}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    why = f": {run['message']}" if run.get("message") else ""
    if as_json:
        typer.echo(orjson.dumps({"name": run["name"], "status": run["status"], "message": run.get("message") or ""}).decode())
    else:
        typer.echo(
            f"penstock: {WORDS[kind]} {run['name']} is {run['status']}{why}; see: penstock {kind} info {run['name']}", err=True
        )
    if run["status"] != "finished":
        raise typer.Exit(1)


def _until_over(held: "_Held", kind: "RunKind", name: str, say: Callable[[Any], None]) -> dict[str, Any]:
    """Say every line once, in order; the run as it is in the end."""
    cursor: str | None = None
    while True:
        # asked before the page: what is said before a run is over is on a page that is asked for after it
        run = held.ask(lambda client: client.run(kind, name))[KEYS_OF_ONE[kind]]
        place = cursor
        page = held.ask(lambda client: client.logs(kind, run["id"], limit=PAGE, cursor=place, direction="newer"))  # noqa: B023
        for entry in page["logs"]:
            say(entry)
        cursor = page.get("next_cursor") or cursor
        if page["logs"]:
            continue
        if run["status"] in OVER:
            return run
        time.sleep(POLL_S)


class _Held:
    """A controller that is asked again after it was away: it may be started anew, elsewhere on this machine too."""

    def __init__(self, connect: "Callable[[], ControllerClient]", client: "ControllerClient") -> None:
        self._connect, self._client = connect, client

    def ask(self, question: "Callable[[ControllerClient], dict[str, Any]]") -> dict[str, Any]:
        """The answer, once there is one."""
        deadline = time.monotonic() + AWAY_S
        told = False
        while True:
            try:
                return question(self._client)
            except ControllerError as error:
                if not _passing(error) or time.monotonic() > deadline:
                    raise
                if not told:
                    typer.echo(f"penstock: {error}; waiting for it", err=True)
                told = True
            time.sleep(POLL_S)
            self._again()

    def _again(self) -> None:
        try:
            self._client = self._connect()
        except ControllerError as error:
            if not _passing(error):
                raise


def _passing(error: ControllerError) -> bool:
    return error.status is None or error.status >= 500


def _as_json(entry: Any) -> str:
    return orjson.dumps(entry).decode()


def _as_row(entry: Any) -> str:
    cells = (entry.get(key) or "" for key in ("timestamp", "level", "step", "message"))
    return "\t".join(" ".join(str(cell).split()) for cell in cells)


def _as_line(entry: Any) -> str:
    step = f"[{entry['step']}] " if entry.get("step") else ""
    level = f"{str(entry['level']).upper()} " if str(entry.get("level", "info")).lower() not in ("info", "") else ""
    return f"{when(entry.get('timestamp'))[11:]} {level}{step}{entry.get('message', '')}".rstrip()


KEYS_OF_ONE: dict["RunKind", str] = {"eval": "eval_run", "train": "training_run"}
"""Of the run itself in what is told of one."""


WORDS: dict["RunKind", str] = {"eval": "evaluation", "train": "training run"}
