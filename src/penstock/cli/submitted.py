"""`penstock eval|train submit, list, info, stop, download`: runs that a controller carries out."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.dry_run import Option, try_once, warn
from penstock.cli.following import attach_logs
from penstock.cli.submitted_view import COLUMNS, KEYS, KEYS_OF_ONE, WORDS, as_text, downloaded_text, submitted_text
from penstock.cli.telling import All, AsJson, Limit, Plain, Yes, confirmed, save, show, show_rows
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.controller.client import Client
    from penstock.controller.runs import Kind

TYPES: dict["Kind", tuple[str, ...]] = {
    "eval": ("metrics", "trajectories", "artifacts", "logs"),
    "train": ("metrics", "logs", "report", "checkpoints"),
}
"""What can be downloaded; without --type the first two of an evaluation, and all but checkpoints of a training run."""
USUAL: dict["Kind", tuple[str, ...]] = {"eval": ("metrics", "trajectories"), "train": ("metrics", "logs", "report")}

Name = Annotated[str, typer.Argument(metavar="NAME", help="The run's name or id.")]


def attach(app: typer.Typer, kind: "Kind") -> None:
    """Add the commands about submitted runs of this kind to a group."""
    word = WORDS[kind]
    made: tuple[tuple[str, str, Callable[..., None]], ...] = (
        ("submit", f"Queue a {word} of an experiment file or of a penstock.toml; a controller carries it out.", _submit(kind)),
        ("list", f"List submitted {word}s, newest first.", _list(kind)),
        ("info", f"Tell how a submitted {word} stands.", _details(kind)),
        ("stop", f"Stop a submitted {word}; what it has made so far stays.", _stop(kind)),
        ("download", f"Fetch the files of a submitted {word}; those that are there whole are skipped.", _download(kind)),
    )
    for name, text, command in made:
        app.command(name, help=text.replace("a evaluation", "an evaluation"))(command)
    attach_logs(app, kind)


def _submit(kind: "Kind") -> Callable[..., None]:
    def submit(
        file: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config file.")],
        name: Annotated[
            str | None, typer.Option(help="Of the run; else of the rollout, with a number where that is taken.")
        ] = None,
        overrides: Annotated[
            list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
        ] = None,
        dry: Option = False,
        yes: Yes = False,
        as_json: AsJson = False,
    ) -> None:
        from penstock.cli.connection import connect, transferring
        from penstock.controller.submitting import prepare, send
        from penstock.workspace.opening import open_config

        prepared = prepare(kind, file, name=name, overrides=overrides or ())
        if dry:
            config = open_config(file, overrides or [], kind, tell=warn)
            try_once(config, kind, as_json=as_json, following=f"penstock {kind} submit {file}")
        confirmed(f"Submit {WORDS[kind]} of {prepared.rollout} with {prepared.model} on {prepared.dataset}?", yes=yes or as_json)
        client = connect()
        with transferring() as progress:
            record = send(prepared, client, progress=progress)
        following = [f"penstock {kind} {command}" for command in (f"logs {record['name']} -f", f"info {record['name']}")]
        found = record | {"controller": client.url, "next": following}
        show(found, submitted_text(kind, prepared, record, client.url), as_json=as_json)

    return submit


def _list(kind: "Kind") -> Callable[..., None]:
    def list_runs(limit: Limit = 20, everything: All = False, plain: Plain = False, as_json: AsJson = False) -> None:
        from penstock.cli.connection import connect, listed

        client, key = connect(), KEYS[kind]
        page = listed(lambda limit, offset: client.runs(kind, limit=limit, offset=offset), key, limit, everything=everything)
        empty = f"no {WORDS[kind]} was submitted yet; begin with: penstock {kind} submit CONFIG"
        show_rows(page, key, COLUMNS[kind], as_json=as_json, plain=plain, empty=empty)

    return list_runs


def _details(kind: "Kind") -> Callable[..., None]:
    def details(
        name: Name,
        output: Annotated[Path | None, typer.Option("-o", "--output", help="Write what --json prints to this file too.")] = None,
        as_json: AsJson = False,
    ) -> None:
        from penstock.cli.connection import connect

        found = _found(connect(), kind, name)
        if output is not None:
            save(output / f"{name}.json" if output.is_dir() else output, orjson.dumps(found, option=orjson.OPT_INDENT_2))
        show(found, as_text(kind, found), as_json=as_json)

    return details


def _found(client: "Client", kind: "Kind", name: str) -> dict[str, Any]:
    """A run with its numbers, once it has some."""
    found = client.run(kind, name)
    run = found[KEYS_OF_ONE[kind]]
    found["metrics"] = None if run["status"] == "pending" else client.metrics(kind, run["id"])
    if kind == "train":
        found["checkpoints"] = [] if run["status"] == "pending" else client.checkpoints(run["id"]).get("checkpoints", [])
    return found


def _stop(kind: "Kind") -> Callable[..., None]:
    def stop(name: Name, yes: Yes = False, as_json: AsJson = False) -> None:
        from penstock.cli.connection import connect

        client = connect()
        confirmed(f"Stop {WORDS[kind]} {name}?", yes=yes or as_json)
        client.stop(kind, name)
        text = f"Asked {WORDS[kind]} {name} to stop; what it has made so far stays.\n\n  next  penstock {kind} info {name}"
        show({"name": name, "kind": kind, "stop_asked": True, "next": [f"penstock {kind} info {name}"]}, text, as_json=as_json)

    return stop


def _download(kind: "Kind") -> Callable[..., None]:
    def download(
        name: Name,
        types: Annotated[str | None, typer.Option("--type", metavar="A,B,…", help=f"Out of {', '.join(TYPES[kind])}, all.")] = None,
        rows: Annotated[str | None, typer.Option(help="Only files of these tasks, such as 0-9,17.")] = None,
        output: Annotated[Path | None, typer.Option("-o", "--output", help="The folder; else downloads/KIND/NAME.")] = None,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Fetch files again that are there.")] = False,
        as_json: AsJson = False,
    ) -> None:
        from penstock.cli.connection import connect, transferring
        from penstock.controller.downloading import fetch_files

        chosen = _types(kind, types)
        client = connect()
        run = client.run(kind, name)[KEYS_OF_ONE[kind]]
        files = client.manifest(kind, run["id"], types=chosen, rows=rows)["files"]
        if not files:
            text = f"{WORDS[kind]} {name} is {run['status']} and has no files of {', '.join(chosen)}"
            raise ConfigError(f"{text}; see: penstock {kind} info {name}")
        into = output or Path("downloads") / kind / run["name"]
        with transferring() as progress:
            fetched = fetch_files(client, kind, run["id"], files, into, overwrite=overwrite, progress=progress)
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
        show(found, downloaded_text(kind, found), as_json=as_json)
        if fetched.failed:
            raise typer.Exit(1)

    return download


def _types(kind: "Kind", given: str | None) -> tuple[str, ...]:
    if given is None:
        return USUAL[kind]
    named = [each.strip() for each in given.split(",") if each.strip()]
    if unknown := [each for each in named if each not in (*TYPES[kind], "all")]:
        raise ConfigError(f"--type {unknown[0]}: a run of {kind} has {', '.join(TYPES[kind])}; all takes all of them")
    if not named:
        raise ConfigError(f"--type is empty; name some of {', '.join(TYPES[kind])}, or all")
    return TYPES[kind] if "all" in named else tuple(named)
