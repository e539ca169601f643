"""`penstock eval|train submit, list, info, logs, stop, download`: runs on a controller."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli import local_runs
from penstock.cli.dry_run import Option, try_once
from penstock.cli.local_runs import KIND_NAMES, LOG_LINES, PLACES, Name, Output, check_kind, find_local_run, print_log
from penstock.cli.output import (
    All,
    AsJson,
    Limit,
    Plain,
    TableColumn,
    Yes,
    check_format,
    confirm,
    elapsed,
    file_size,
    labelled_lines,
    local_time,
    print_result,
    print_table,
    warn,
)
from penstock.config import RunKind
from penstock.errors import ConfigError, ControllerError
from penstock.run.folder import RunFolder
from penstock.run.shortfalls import read_shortfalls, shortfall_rows
from penstock.system.async_tools import INTERRUPTED
from penstock_controller.cli.connection import PANEL, connect, connect_if_running, fetch_page, transfer_progress

if TYPE_CHECKING:
    from penstock_controller.client import ControllerClient
    from penstock_controller.submit import PreparedSubmission


RUN_KEYS: dict[RunKind, str] = {"eval": "eval_run", "train": "training_run"}
"""Key of the run in a controller's answer."""
HTTP_NOT_FOUND = 404
POLL_S = 0.5
RECONNECT_S = 300.0
"""How long to wait for a controller that is gone."""
PAGE = 200
FINAL_STATUSES = frozenset({"finished", "failed", "stopped"})


def _logs(kind: RunKind) -> Callable[..., None]:
    def logs(
        name: Name,
        follow: Annotated[bool, typer.Option("-f", "--follow", help="Print from the start until the run ends.")] = False,
        limit: Annotated[
            int | None, typer.Option(min=1, max=200, help="The most lines to print; the newest 50 by default.")
        ] = None,
        cursor: Annotated[str | None, typer.Option(help="Print older lines, from the cursor of an earlier page.")] = None,
        plain: Plain = False,
        as_json: AsJson = False,
    ) -> None:
        if follow and (limit is not None or cursor is not None):
            raise ConfigError("-f prints everything; it goes without --limit and --cursor")
        check_format(as_json=as_json, plain=plain)
        line = _as_json if as_json else _as_row if plain else _as_line
        known = find_run(kind, name)
        if isinstance(known, RunFolder):
            print_log(known, None if follow else limit or LOG_LINES, as_json=as_json)
        elif follow:
            _follow(kind, name, lambda entry: typer.echo(line(entry)), as_json=as_json)
        else:
            _page(kind, name, limit or LOG_LINES, cursor, line, as_json=as_json)

    return logs


def find_run(kind: RunKind, name: str) -> "ControllerClient | RunFolder":
    """Returns the controller that knows the run, else the run's folder here. Starts nothing.

    ConfigError if there is neither, or the folder is of a run of the other kind.
    """
    client, local = connect_if_running(), find_local_run(kind, name)
    if client is not None and (local is None or _knows(client, kind, name)):
        return client
    if local is None:
        text = f"no run {name!r} in {PLACES[kind]}/ here, and no controller runs"
        raise ConfigError(f"{text}; see: penstock {kind} list, or start the controller: penstock controller up")
    return check_kind(kind, local, name)


def _knows(client: "ControllerClient", kind: RunKind, name: str) -> bool:
    try:
        client.run(kind, name)
    except ControllerError as error:
        if error.status != HTTP_NOT_FOUND:
            raise
        return False
    return True


def _page(kind: RunKind, name: str, limit: int, cursor: str | None, line: Callable[[Any], str], *, as_json: bool) -> None:
    page = connect().logs(kind, name, limit=limit, cursor=cursor)
    if as_json:
        print_result(page, "", as_json=True)
        return
    for entry in page["logs"]:
        typer.echo(line(entry))
    if not page["logs"]:
        typer.echo(f"the log is empty; see: penstock {kind} info {name}", err=True)
    elif page.get("next_cursor"):
        typer.echo(f"older lines: penstock {kind} logs {name} --cursor {page['next_cursor']}", err=True)


def _follow(kind: RunKind, name: str, write: Callable[[Any], None], *, as_json: bool) -> None:
    try:
        run = _print_until_over(ReconnectingClient(connect), kind, name, write)
    except KeyboardInterrupt:
        warn(f"the run continues; to stop it: penstock {kind} stop {name}")
        raise typer.Exit(INTERRUPTED) from None
    why = f": {run['message']}" if run.get("message") else ""
    if as_json:
        typer.echo(orjson.dumps({"name": run["name"], "status": run["status"], "message": run.get("message") or ""}).decode())
    else:
        warn(f"{KIND_NAMES[kind]} {run['name']} is {run['status']}{why}; see: penstock {kind} info {run['name']}")
    if run["status"] != "finished":
        raise typer.Exit(1)


def _print_until_over(client: "ReconnectingClient", kind: RunKind, name: str, write: Callable[[Any], None]) -> dict[str, Any]:
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
    """Repeats a call while the controller is away; it may return at another address."""

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


LIST_KEYS: dict[RunKind, str] = {"eval": "eval_runs", "train": "training_runs"}
"""The key of the list in a page."""
TYPES: dict[RunKind, tuple[str, ...]] = {
    "eval": ("metrics", "trajectories", "artifacts", "logs"),
    "train": ("metrics", "logs", "report", "checkpoints"),
}
"""What can be downloaded; without --type the first two of an evaluation, and all but checkpoints of a training run."""
DEFAULT_TYPES: dict[RunKind, tuple[str, ...]] = {"eval": ("metrics", "trajectories"), "train": ("metrics", "logs", "report")}


def add_run_commands(app: typer.Typer, kind: RunKind) -> None:
    """Adds the commands about runs of this kind to a group."""
    word = KIND_NAMES[kind]
    one = f"an {word}" if kind == "eval" else f"a {word}"
    ending = "With -f, follow it to the end (exit code 1 unless it finished); --json then prints one object per line."
    for name, text, command in (
        ("list", f"List the {word}s in run folders here and the submitted ones, newest first.", _list(kind)),
        ("info", f"Show the state of {one}, in a run folder here or submitted.", _info(kind)),
        ("logs", f"Print the log of {one}. {ending}", _logs(kind)),
    ):
        app.command(name, help=text)(command)
    for name, text, command in (
        ("submit", f"Queue {one} of an experiment file or a penstock.toml; a controller executes it.", _submit(kind)),
        ("stop", f"Stop a submitted {word}; its results so far are kept.", _stop(kind)),
        ("download", f"Download the files of a submitted {word}; skips complete ones.", _download(kind)),
    ):
        app.command(name, help=text, rich_help_panel=PANEL)(command)


def _submit(kind: RunKind) -> Callable[..., None]:
    def submit(
        file: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config file.")],
        name: Annotated[str | None, typer.Option(help="Name of the run; by default the rollout's, numbered if taken.")] = None,
        overrides: Annotated[
            list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
        ] = None,
        dry: Option = False,
        yes: Yes = False,
        as_json: AsJson = False,
    ) -> None:
        from penstock.run.inputs import load_run_config
        from penstock_controller.submit import prepare_submission, send_submission

        prepared = prepare_submission(kind, file, name=name, overrides=overrides or ())
        if dry:
            config = load_run_config(file, overrides or [], kind, warn=warn)
            try_once(config, kind, as_json=as_json, following=f"penstock {kind} submit {file}")
        confirm(f"Submit {KIND_NAMES[kind]} of {prepared.rollout} with {prepared.model} on {prepared.dataset}?", yes=yes or as_json)
        client = connect()
        with transfer_progress() as progress:
            record = send_submission(prepared, client, progress=progress)
        following = [f"penstock {kind} {command}" for command in (f"logs {record['name']} -f", f"info {record['name']}")]
        found = record | {"controller": client.url, "next": following}
        print_result(found, submitted_text(kind, prepared, record, client.url), as_json=as_json)

    return submit


def _list(kind: RunKind) -> Callable[..., None]:
    def list_runs(limit: Limit = 20, everything: All = False, plain: Plain = False, as_json: AsJson = False) -> None:
        client, key, local = connect_if_running(), LIST_KEYS[kind], local_runs.local_runs(kind)
        page: dict[str, Any] = {key: [], "total_count": 0, "has_more": False, "next_offset": None}
        if client is not None:
            page = fetch_page(
                lambda limit, offset: client.runs(kind, limit=limit, offset=offset), key, limit, everything=everything
            )
        if as_json or client is not None:
            empty = f"no {KIND_NAMES[kind]} was submitted yet; begin with: penstock {kind} submit CONFIG"
            print_table(page | {"local_runs": local}, key, COLUMNS[kind], as_json=as_json, plain=plain, empty=empty)
        if not as_json and (client is None or (local and not plain)):
            if client is not None:
                typer.echo(f"\nRun folders in {local_runs.PLACES[kind]}/:\n")
            empty = (
                f"no {KIND_NAMES[kind]} in {local_runs.PLACES[kind]}/ here, and no controller runs; begin with: penstock {kind} run"
            )
            print_table({"local": local}, "local", local_runs.COLUMNS, as_json=False, plain=plain, empty=empty)

    return list_runs


def _info(kind: RunKind) -> Callable[..., None]:
    def details(name: Name, output: Output = None, as_json: AsJson = False) -> None:
        known = find_run(kind, name)
        if isinstance(known, RunFolder):
            found = local_runs.local_info(kind, known)
            text = local_runs.info_text(kind, found)
        else:
            found = _fetch_run(known, kind, name)
            text = as_text(kind, found)
        local_runs.print_info(name, found, text, output=output, as_json=as_json)

    return details


def _fetch_run(client: "ControllerClient", kind: RunKind, name: str) -> dict[str, Any]:
    """A run with its metrics, which a pending one does not have yet."""
    found = client.run(kind, name)
    run = found[RUN_KEYS[kind]]
    found["metrics"] = None if run["status"] == "pending" else client.metrics(kind, run["id"])
    if kind == "train":
        found["checkpoints"] = [] if run["status"] == "pending" else client.checkpoints(run["id"]).get("checkpoints", [])
    return found


def _stop(kind: RunKind) -> Callable[..., None]:
    def stop(name: Name, yes: Yes = False, as_json: AsJson = False) -> None:
        client = connect()
        confirm(f"Stop {KIND_NAMES[kind]} {name}?", yes=yes or as_json)
        client.stop(kind, name)
        text = f"Asked {KIND_NAMES[kind]} {name} to stop; its results so far are kept.\n\n  next  penstock {kind} info {name}"
        print_result(
            {"name": name, "kind": kind, "stop_asked": True, "next": [f"penstock {kind} info {name}"]}, text, as_json=as_json
        )

    return stop


def _download(kind: RunKind) -> Callable[..., None]:
    def download(
        name: Name,
        types: Annotated[str | None, typer.Option("--type", metavar="A,B,…", help=f"Out of {', '.join(TYPES[kind])}, all.")] = None,
        rows: Annotated[str | None, typer.Option(help="Only files of these tasks, such as 0-9,17.")] = None,
        output: Annotated[Path | None, typer.Option("-o", "--output", help="The folder; else downloads/KIND/NAME.")] = None,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Download existing files again.")] = False,
        as_json: AsJson = False,
    ) -> None:
        from penstock_controller.downloads import download_files

        chosen = _types(kind, types)
        client = connect()
        run = client.run(kind, name)[RUN_KEYS[kind]]
        files = client.manifest(kind, run["id"], types=chosen, rows=rows)["files"]
        if not files:
            text = f"{KIND_NAMES[kind]} {name} is {run['status']} and has no files of {', '.join(chosen)}"
            raise ConfigError(f"{text}; see: penstock {kind} info {name}")
        into = output or Path("downloads") / kind / run["name"]
        with transfer_progress() as progress:
            fetched = download_files(client, kind, run["id"], files, into, overwrite=overwrite, progress=progress)
        found = {
            "status": "partial" if fetched.failed else "done",
            "name": run["name"],
            "folder": str(into),
            "types": list(chosen),
            "downloaded": len(fetched.downloaded),
            "skipped": len(fetched.skipped),
            "failed": [{"path": path, "error": why} for path, why in fetched.failed.items()],
            "bytes": fetched.bytes,
        }
        print_result(found, downloaded_text(kind, found), as_json=as_json)
        if fetched.failed:
            raise typer.Exit(1)

    return download


def _types(kind: RunKind, chosen: str | None) -> tuple[str, ...]:
    if chosen is None:
        return DEFAULT_TYPES[kind]
    named = [each.strip() for each in chosen.split(",") if each.strip()]
    if unknown := [each for each in named if each not in (*TYPES[kind], "all")]:
        raise ConfigError(f"--type {unknown[0]}: a run of {kind} has {', '.join(TYPES[kind])}; all takes all of them")
    if not named:
        raise ConfigError(f"--type is empty; name some of {', '.join(TYPES[kind])}, or all")
    return TYPES[kind] if "all" in named else tuple(named)


# Columns of lists


def _name_in(key: str, *names: str) -> Any:
    def cell(row: Mapping[str, Any]) -> object:
        found: Mapping[str, Any] = row.get(key) or {}
        return next((found[name] for name in ("name", *names) if found.get(name)), "")

    return cell


def _score(row: Mapping[str, Any]) -> object:
    results: Mapping[str, Any] = row.get("results") or {}
    return results.get("score")


def _progress(row: Mapping[str, Any]) -> object:
    step, total = row.get("current_step"), row.get("total_steps")
    return f"{step}/{total}" if step is not None and total else ""


_FIRST = (
    TableColumn("name", lambda row: row.get("name")),
    TableColumn("status", lambda row: row.get("status")),
    TableColumn("rollout", _name_in("rollout")),
    TableColumn("model", _name_in("model", "model_name")),
    TableColumn("dataset", _name_in("dataset", "file_name")),
)
_LAST = (
    TableColumn("submitted", lambda row: local_time(row.get("created_at"))),
    TableColumn("by", lambda row: row.get("creator_name")),
)
COLUMNS: dict[RunKind, tuple[TableColumn, ...]] = {
    "eval": (*_FIRST, TableColumn("reward", _score), *_LAST),
    "train": (*_FIRST, TableColumn("step", _progress), TableColumn("reward", lambda row: row.get("reward")), *_LAST),
}


# Results as text


def submitted_text(kind: RunKind, prepared: "PreparedSubmission", record: Mapping[str, Any], url: str) -> str:
    """What was queued where, and what to run next."""
    name = record["name"]
    head = f"Queued {KIND_NAMES[kind]} {name} at {url}."
    facts = [
        *(("id", record["id"]), ("rollout", prepared.rollout), ("model", prepared.model), ("dataset", prepared.dataset)),
        *(("branch", prepared.branch), ("commit", prepared.commit_sha)),
    ]
    following = [
        ("follow", f"penstock {kind} logs {name} -f"),
        ("result", f"penstock {kind} info {name}"),
        ("files", f"penstock {kind} download {name}"),
    ]
    return f"{head}\n\n{labelled_lines(facts)}\n\n{labelled_lines(following)}"


def as_text(kind: RunKind, found: Mapping[str, Any]) -> str:
    """A run's status, inputs and numbers, and what to run next."""
    run: Mapping[str, Any] = found[RUN_KEYS[kind]]
    parts = [
        f"{KIND_NAMES[kind].capitalize()} {run['name']} is {run['status']}" + (f": {run['message']}" if run.get("message") else ""),
        labelled_lines(_status_rows(run, found)),
        labelled_lines(_evaluation_rows(found) if kind == "eval" else _training_rows(run, found)),
        labelled_lines([("next", _next(kind, run))]),
    ]
    return "\n\n".join(part for part in parts if part)


def _status_rows(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, object]]:
    config: Mapping[str, Any] = found.get("config") or {}
    scopes: Mapping[str, Any] = found.get("resolved_secret_scopes") or {}
    return [
        ("id", run.get("id")),
        ("submitted", local_time(run.get("created_at"))),
        ("started", local_time(run.get("started_at"))),
        ("took" if run.get("completed_at") else "for", elapsed(run.get("started_at"), run.get("completed_at"))),
        ("rollout", _name_in("rollout")(found)),
        ("entrypoint", found.get("entrypoint")),
        ("model", _name_in("model", "model_name")(found) or config.get("model_path")),
        ("dataset", _name_in("dataset", "file_name")(found)),
        ("branch", found.get("branch")),
        ("commit", (found.get("commit_sha") or "")[:12]),
        ("secrets", ", ".join(f"{name} ({scope})" for name, scope in scopes.items())),
    ]


def _evaluation_rows(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    results: Mapping[str, Any] = found.get("results") or {}
    stats: Mapping[str, Any] = results.get("reward_stats") or {}
    metrics: Mapping[str, Any] = found.get("metrics") or {}
    chances: list[dict[str, Any]] = metrics.get("pass_at_k") or []
    passes = ", ".join(f"{one['k']}: {one['value']:.3g}" for one in chances if one.get("value") is not None)
    spread = ", ".join(f"{key} {stats[key]:.3g}" for key in ("median", "std", "min", "max") if stats.get(key) is not None)
    return [
        ("reward", results.get("score")),
        ("", spread),
        ("pass@k", passes),
        ("attempts", results.get("total_runs")),
        ("passed", f"{results['passed']} of {results.get('graded')} graded" if results.get("passed") is not None else None),
        *shortfall_rows(read_shortfalls(results.get("shortfalls"))),
        ("tokens", results.get("total_tokens")),
    ]


def _training_rows(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, object]]:
    metrics: Mapping[str, Any] = found.get("metrics") or {}
    overview: Mapping[str, Any] = metrics.get("overview") or {}
    summaries: list[Mapping[str, Any]] = overview.get("metric_summaries") or []
    shown = [(str(one.get("title") or one.get("key")), _curve(one)) for one in summaries]
    checkpoints: list[dict[str, Any]] = found.get("checkpoints") or []
    kept = ", ".join(str(one.get("checkpoint_name") or one.get("id")) for one in checkpoints)
    steps = f"{overview.get('latest_step')} of {overview.get('total_steps')}" if overview.get("latest_step") is not None else None
    return [("steps", steps), ("examples", run.get("examples_processed_count")), *shown, ("checkpoints", kept)]


def _curve(one: Mapping[str, Any]) -> str:
    first, last = one.get("initial"), one.get("latest")
    return f"{first:.4g} → {last:.4g}" if isinstance(first, int | float) and isinstance(last, int | float) else ""


def _next(kind: RunKind, run: Mapping[str, Any]) -> str:
    if run["status"] in ("pending", "running"):
        return f"penstock {kind} logs {run['name']} -f"
    return f"penstock {kind} download {run['name']}" if run["status"] == "finished" else f"penstock {kind} logs {run['name']}"


def downloaded_text(kind: RunKind, found: Mapping[str, Any]) -> str:
    """How many files were fetched, where they are, and which failed."""
    there = f", {found['skipped']} were there" if found["skipped"] else ""
    lines = [f"Fetched {found['downloaded']} files ({file_size(found['bytes'])}) into {found['folder']}{there}."]
    lines += [f"  failed  {failure['path']}: {failure['error']}" for failure in found["failed"]]
    if found["failed"]:
        lines.append(f"\n  next  the same command fetches what is missing: penstock {kind} download {found['name']}")
    return "\n".join(lines)
