"""Submitted runs as text: lists, one of them, what was queued, what was fetched."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.dry_run import Option, try_once, warn
from penstock.cli.logs import KEYS_OF_ONE, WORDS, attach_logs
from penstock.cli.output import (
    All,
    AsJson,
    Column,
    Limit,
    Plain,
    Yes,
    confirmed,
    labelled,
    lasted,
    save,
    show,
    show_rows,
    size,
    when,
)
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.controller.client import ControllerClient
    from penstock.controller.runs import RunKind
    from penstock.controller.submit import PreparedSubmission


KEYS: dict["RunKind", str] = {"eval": "eval_runs", "train": "training_runs"}
"""Of the list in a page."""


def _named(key: str, *names: str) -> Any:
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
    Column("name", lambda row: row.get("name")),
    Column("status", lambda row: row.get("status")),
    Column("rollout", _named("rollout")),
    Column("model", _named("model", "model_name")),
    Column("dataset", _named("dataset", "file_name")),
)
_LAST = (Column("submitted", lambda row: when(row.get("created_at"))), Column("by", lambda row: row.get("creator_name")))
COLUMNS: dict["RunKind", tuple[Column, ...]] = {
    "eval": (*_FIRST, Column("reward", _score), *_LAST),
    "train": (*_FIRST, Column("step", _progress), Column("reward", lambda row: row.get("reward")), *_LAST),
}


def submitted_text(kind: "RunKind", prepared: "PreparedSubmission", record: Mapping[str, Any], url: str) -> str:
    """What was queued where, and what to run next."""
    name = record["name"]
    head = f"Queued {WORDS[kind]} {name} at {url}."
    facts = [
        *(("id", record["id"]), ("rollout", prepared.rollout), ("model", prepared.model), ("dataset", prepared.dataset)),
        *(("branch", prepared.branch), ("commit", prepared.commit_sha)),
    ]
    following = [
        ("follow", f"penstock {kind} logs {name} -f"),
        ("result", f"penstock {kind} info {name}"),
        ("files", f"penstock {kind} download {name}"),
    ]
    return f"{head}\n\n{labelled(facts)}\n\n{labelled(following)}"


def as_text(kind: "RunKind", found: Mapping[str, Any]) -> str:
    """One run: where it stands, what it is of, its numbers, what to run next."""
    run: Mapping[str, Any] = found[KEYS_OF_ONE[kind]]
    parts = [
        f"{WORDS[kind].capitalize()} {run['name']} is {run['status']}" + (f": {run['message']}" if run.get("message") else ""),
        labelled(_standing(run, found)),
        labelled(_evaluated(found) if kind == "eval" else _trained(run, found)),
        labelled([("next", _next(kind, run))]),
    ]
    return "\n\n".join(part for part in parts if part)


def _standing(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, object]]:
    config: Mapping[str, Any] = found.get("config") or {}
    scopes: Mapping[str, Any] = found.get("resolved_secret_scopes") or {}
    return [
        ("id", run.get("id")),
        ("submitted", when(run.get("created_at"))),
        ("started", when(run.get("started_at"))),
        ("took" if run.get("completed_at") else "for", lasted(run.get("started_at"), run.get("completed_at"))),
        ("rollout", _named("rollout")(found)),
        ("entrypoint", found.get("entrypoint")),
        ("model", _named("model", "model_name")(found) or config.get("model_path")),
        ("dataset", _named("dataset", "file_name")(found)),
        ("branch", found.get("branch")),
        ("commit", (found.get("commit_sha") or "")[:12]),
        ("secrets", ", ".join(f"{name} ({scope})" for name, scope in scopes.items())),
    ]


def _evaluated(found: Mapping[str, Any]) -> list[tuple[str, object]]:
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
        ("failed", (found.get("metrics") or {}).get("overview", {}).get("skipped")),
        ("tokens", results.get("total_tokens")),
    ]


def _trained(run: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, object]]:
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


def _next(kind: "RunKind", run: Mapping[str, Any]) -> str:
    if run["status"] in ("pending", "running"):
        return f"penstock {kind} logs {run['name']} -f"
    return f"penstock {kind} download {run['name']}" if run["status"] == "finished" else f"penstock {kind} logs {run['name']}"


def downloaded_text(kind: "RunKind", found: Mapping[str, Any]) -> str:
    """How many files came, where they are, what did not come."""
    there = f", {found['skipped']} were there" if found["skipped"] else ""
    lines = [f"Fetched {found['downloaded']} files ({size(found['bytes'])}) into {found['folder']}{there}."]
    lines += [f"  failed  {one['path']}: {one['error']}" for one in found["failed"]]
    if found["failed"]:
        lines.append(f"\n  next  the same command fetches what is missing: penstock {kind} download {found['name']}")
    return "\n".join(lines)


TYPES: dict["RunKind", tuple[str, ...]] = {
    "eval": ("metrics", "trajectories", "artifacts", "logs"),
    "train": ("metrics", "logs", "report", "checkpoints"),
}
"""What can be downloaded; without --type the first two of an evaluation, and all but checkpoints of a training run."""
USUAL: dict["RunKind", tuple[str, ...]] = {"eval": ("metrics", "trajectories"), "train": ("metrics", "logs", "report")}

Name = Annotated[str, typer.Argument(metavar="NAME", help="The run's name or id.")]


def attach(app: typer.Typer, kind: "RunKind") -> None:
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


def _submit(kind: "RunKind") -> Callable[..., None]:
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
        from penstock.controller.submit import prepare_submission, send_submission
        from penstock.workspace.opening import load_run_config

        prepared = prepare_submission(kind, file, name=name, overrides=overrides or ())
        if dry:
            config = load_run_config(file, overrides or [], kind, tell=warn)
            try_once(config, kind, as_json=as_json, following=f"penstock {kind} submit {file}")
        confirmed(f"Submit {WORDS[kind]} of {prepared.rollout} with {prepared.model} on {prepared.dataset}?", yes=yes or as_json)
        client = connect()
        with transferring() as progress:
            record = send_submission(prepared, client, progress=progress)
        following = [f"penstock {kind} {command}" for command in (f"logs {record['name']} -f", f"info {record['name']}")]
        found = record | {"controller": client.url, "next": following}
        show(found, submitted_text(kind, prepared, record, client.url), as_json=as_json)

    return submit


def _list(kind: "RunKind") -> Callable[..., None]:
    def list_runs(limit: Limit = 20, everything: All = False, plain: Plain = False, as_json: AsJson = False) -> None:
        from penstock.cli.connection import connect, listed

        client, key = connect(), KEYS[kind]
        page = listed(lambda limit, offset: client.runs(kind, limit=limit, offset=offset), key, limit, everything=everything)
        empty = f"no {WORDS[kind]} was submitted yet; begin with: penstock {kind} submit CONFIG"
        show_rows(page, key, COLUMNS[kind], as_json=as_json, plain=plain, empty=empty)

    return list_runs


def _details(kind: "RunKind") -> Callable[..., None]:
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


def _found(client: "ControllerClient", kind: "RunKind", name: str) -> dict[str, Any]:
    """A run with its numbers, once it has some."""
    found = client.run(kind, name)
    run = found[KEYS_OF_ONE[kind]]
    found["metrics"] = None if run["status"] == "pending" else client.metrics(kind, run["id"])
    if kind == "train":
        found["checkpoints"] = [] if run["status"] == "pending" else client.checkpoints(run["id"]).get("checkpoints", [])
    return found


def _stop(kind: "RunKind") -> Callable[..., None]:
    def stop(name: Name, yes: Yes = False, as_json: AsJson = False) -> None:
        from penstock.cli.connection import connect

        client = connect()
        confirmed(f"Stop {WORDS[kind]} {name}?", yes=yes or as_json)
        client.stop(kind, name)
        text = f"Asked {WORDS[kind]} {name} to stop; what it has made so far stays.\n\n  next  penstock {kind} info {name}"
        show({"name": name, "kind": kind, "stop_asked": True, "next": [f"penstock {kind} info {name}"]}, text, as_json=as_json)

    return stop


def _download(kind: "RunKind") -> Callable[..., None]:
    def download(
        name: Name,
        types: Annotated[str | None, typer.Option("--type", metavar="A,B,…", help=f"Out of {', '.join(TYPES[kind])}, all.")] = None,
        rows: Annotated[str | None, typer.Option(help="Only files of these tasks, such as 0-9,17.")] = None,
        output: Annotated[Path | None, typer.Option("-o", "--output", help="The folder; else downloads/KIND/NAME.")] = None,
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Fetch files again that are there.")] = False,
        as_json: AsJson = False,
    ) -> None:
        from penstock.cli.connection import connect, transferring
        from penstock.controller.downloads import download_files

        chosen = _types(kind, types)
        client = connect()
        run = client.run(kind, name)[KEYS_OF_ONE[kind]]
        files = client.manifest(kind, run["id"], types=chosen, rows=rows)["files"]
        if not files:
            text = f"{WORDS[kind]} {name} is {run['status']} and has no files of {', '.join(chosen)}"
            raise ConfigError(f"{text}; see: penstock {kind} info {name}")
        into = output or Path("downloads") / kind / run["name"]
        with transferring() as progress:
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
        show(found, downloaded_text(kind, found), as_json=as_json)
        if fetched.failed:
            raise typer.Exit(1)

    return download


def _types(kind: "RunKind", given: str | None) -> tuple[str, ...]:
    if given is None:
        return USUAL[kind]
    named = [each.strip() for each in given.split(",") if each.strip()]
    if unknown := [each for each in named if each not in (*TYPES[kind], "all")]:
        raise ConfigError(f"--type {unknown[0]}: a run of {kind} has {', '.join(TYPES[kind])}; all takes all of them")
    if not named:
        raise ConfigError(f"--type is empty; name some of {', '.join(TYPES[kind])}, or all")
    return TYPES[kind] if "all" in named else tuple(named)
