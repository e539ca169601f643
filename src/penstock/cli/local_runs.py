"""`penstock eval|train list, info, logs`: the run folders of this folder, read from `runs/`."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.cli.output import AsJson, Plain, TableColumn, labelled_lines, print_result, print_table, save_file
from penstock.errors import ConfigError
from penstock.run.folder import RunFolder, find_run_folder
from penstock.run.shortfalls import Shortfall, add_shortfalls, read_shortfalls, shortfall_rows, shortfalls_json
from penstock.system.files import is_locked
from penstock.view.formatting import reward_text
from penstock.view.live import RunState, event_line

if TYPE_CHECKING:
    from penstock.config import RunKind

KIND_NAMES: dict["RunKind", str] = {"eval": "evaluation", "train": "training run"}
PLACES: dict["RunKind", Path] = {"train": Path("runs"), "eval": Path("runs/evals")}
COLUMNS = tuple(
    TableColumn(name, lambda row, name=name: row.get(name)) for name in ("name", "status", "step", "reward", "model", "folder")
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The run's name or id.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write what --json prints to this file too.")]
LOG_LINES = 50


def add_run_commands(app: typer.Typer, kind: "RunKind") -> None:
    """Adds the commands about run folders of this kind to a group."""
    word = "an evaluation" if kind == "eval" else "a training run"
    app.command("list", help=f"List the {KIND_NAMES[kind]}s in run folders here, newest first.")(_list(kind))
    app.command("info", help=f"Print the state of {word} in a run folder here.")(_info(kind))
    app.command("logs", help=f"Print the log of {word} in a run folder here.")(_logs(kind))


def _list(kind: "RunKind") -> Callable[..., None]:
    def list_runs(plain: Plain = False, as_json: AsJson = False) -> None:
        empty = f"no {KIND_NAMES[kind]} in {PLACES[kind]}/ here; begin with: penstock {kind} run"
        print_table({"local_runs": local_runs(kind)}, "local_runs", COLUMNS, as_json=as_json, plain=plain, empty=empty)

    return list_runs


def _info(kind: "RunKind") -> Callable[..., None]:
    def details(name: Name, output: Output = None, as_json: AsJson = False) -> None:
        found = local_info(kind, _open_run(kind, name))
        print_info(name, found, info_text(kind, found), output=output, as_json=as_json)

    return details


def _logs(kind: "RunKind") -> Callable[..., None]:
    def logs(
        name: Name,
        limit: Annotated[int, typer.Option(min=1, help="The most lines to print, the newest.")] = LOG_LINES,
        as_json: AsJson = False,
    ) -> None:
        print_log(_open_run(kind, name), limit, as_json=as_json)

    return logs


def print_info(name: str, found: dict[str, Any], text: str, *, output: Path | None, as_json: bool) -> None:
    """Prints what is known of a run, and saves it if `output` names a file or a folder."""
    if output is not None:
        save_file(output / f"{name}.json" if output.is_dir() else output, orjson.dumps(found, option=orjson.OPT_INDENT_2))
    print_result(found, text, as_json=as_json)


def print_log(run: RunFolder, limit: int | None, *, as_json: bool) -> None:
    lines = list(log_lines(run))
    shown = lines[-limit:] if limit else lines
    typer.echo(orjson.dumps({"folder": str(run.path), "lines": shown}).decode() if as_json else "\n".join(shown))


def local_runs(kind: "RunKind") -> list[dict[str, Any]]:
    """The runs whose folders are here, newest first; folders that are none, or damaged, are left out."""
    found: list[tuple[float, dict[str, Any]]] = []
    for config in PLACES[kind].glob("*/config.json"):
        with suppress(ConfigError, LookupError, TypeError, OSError):
            found.append((config.stat().st_mtime, _row(kind, find_run_folder(config.parent))))
    return [row for _, row in sorted(found, key=lambda each: each[0], reverse=True)]


def _open_run(kind: "RunKind", name: str) -> RunFolder:
    found = find_local_run(kind, name)
    if found is None:
        raise ConfigError(f"no run {name!r} in {PLACES[kind]}/ here; see: penstock {kind} list")
    return check_kind(kind, found, name)


def find_local_run(kind: "RunKind", name: str) -> RunFolder | None:
    """The run of that name, or in that folder; None if there is none."""
    for path in (PLACES[kind] / name, Path(name)):
        if (path / "config.json").is_file():
            return find_run_folder(path)
    return None


def check_kind(kind: "RunKind", run: RunFolder, name: str) -> RunFolder:
    """Returns the run; ConfigError if it is of the other kind."""
    if kind == "train" and run.kind == "eval":
        raise ConfigError(f"{run.path} is an evaluation; see: penstock eval info {name}")
    if kind == "eval" and run.kind == "train":
        raise ConfigError(f"{run.path} is a training run; see: penstock train info {name}")
    return run


def _row(kind: "RunKind", run: RunFolder) -> dict[str, Any]:
    config, summary = run.settings()["config"], run.summary() or {}
    running = is_locked(run.path / ".lock") if (run.path / ".lock").exists() else False
    row = {"name": run.path.name, "status": "running" if running else summary.get("status", "not finished")}
    row |= {"model": config["model"]["name"], "folder": str(run.path)}
    if kind == "eval":
        outcome: dict[str, Any] = summary.get("outcome") or {}
        if row["status"] == "finished" and outcome.get("ends") and "completed" not in outcome["ends"]:
            row["status"] = "failed"
        return row | {"step": None, "reward": (outcome.get("reward") or {}).get("value"), "ends": outcome.get("ends", {})}
    metrics = run.metrics()
    row["step"] = f"{len(metrics)}/{config['train']['steps']}"
    return row | {"reward": metrics[-1]["reward"] if metrics else None, "ends": summary.get("ends", {})}


def local_info(kind: "RunKind", run: RunFolder) -> dict[str, Any]:
    """What is known of a run, as `--json` prints it."""
    if "train" not in run.settings()["config"]:
        raise ConfigError(
            f"{run.path} is a recording, no {kind} run; see: penstock pool show {run.path}, penstock report {run.path}"
        )
    return {"local_run": _row(kind, run), "summary": run.summary(), "shortfalls": shortfalls_json(_shortfalls(kind, run))}


def _shortfalls(kind: "RunKind", run: RunFolder) -> dict[str, Shortfall]:
    """Failed, ungraded and wrong, of a training run up to its last step."""
    if kind == "eval":
        outcome: dict[str, Any] = (run.summary() or {}).get("outcome") or {}
        return read_shortfalls(outcome.get("shortfalls"))
    return add_shortfalls(read_shortfalls(entry.get("shortfalls")) for entry in run.metrics())


def info_text(kind: "RunKind", found: dict[str, Any]) -> str:
    row: dict[str, Any] = found["local_run"]
    summary: dict[str, Any] = found["summary"] or {}
    rows: list[tuple[str, object]] = [("folder", row["folder"]), ("model", row["model"]), ("step", row["step"])]
    rows.append(("reward", reward_text(row["reward"])))
    if kind == "train":
        held_out = summary.get("eval_before"), summary.get("eval_after")
        rows += [("held-out", " → ".join(map(reward_text, held_out)) if any(each is not None for each in held_out) else None)]
        rows += [("checkpoint", summary.get("checkpoint")), ("", summary.get("stalled"))]
    rows.append(("rollouts", ", ".join(f"{count} {end}" for end, count in row["ends"].items())))
    rows += shortfall_rows(read_shortfalls(found["shortfalls"]))
    following = f"penstock report {row['folder']}" if kind == "train" else f"penstock eval compare {row['folder']} OTHER"
    head = f"{'Training run' if kind == 'train' else 'Evaluation'} {row['name']} is {row['status']}, in a folder here."
    return f"{head}\n\n{labelled_lines(rows)}\n\n{labelled_lines([('next', following)])}"


def log_lines(run: RunFolder) -> Iterator[str]:
    """What the run said, as lines with the time of day."""
    times = [0.0]
    state = RunState(rollouts_per_step=1, clock=lambda: times[-1])
    for line in run.events.read_bytes().splitlines() if run.events.exists() else ():
        with suppress(ValueError, LookupError, TypeError):  # a kill cut it short, or it is another penstock's
            event: dict[str, Any] = orjson.loads(line)
            kind, time = event.pop("kind"), event.pop("time")
            times[-1] = time
            state.apply(kind, event)
            if text := event_line(kind, event, state):
                yield f"{datetime.fromtimestamp(time).astimezone():%H:%M:%S} {text}"
