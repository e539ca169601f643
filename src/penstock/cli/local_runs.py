"""Run folders of this folder, as `penstock eval|train list, info, logs` show them: read from `runs/`, nothing is started."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from penstock.cli.live import RunState, event_line
from penstock.cli.output import TableColumn, labelled_lines, reward_text
from penstock.errors import ConfigError, ControllerError
from penstock.run.folder import RunFolder, find_run_folder
from penstock.run.shortfalls import Shortfall, add_shortfalls, read_shortfalls, shortfall_rows, shortfalls_json
from penstock.system.locks import is_locked

if TYPE_CHECKING:
    from penstock.controller.client import ControllerClient
    from penstock.controller.runs import RunKind

HTTP_NOT_FOUND = 404
PLACES: dict["RunKind", Path] = {"train": Path("runs"), "eval": Path("runs/evals")}
COLUMNS = tuple(
    TableColumn(name, lambda row, name=name: row.get(name)) for name in ("name", "status", "step", "reward", "model", "folder")
)


def local_runs(kind: "RunKind") -> list[dict[str, Any]]:
    """The runs whose folders are here, newest first; folders that are none, or damaged, are left out."""
    found: list[tuple[float, dict[str, Any]]] = []
    for config in PLACES[kind].glob("*/config.json"):
        with suppress(ConfigError, LookupError, TypeError, OSError):
            found.append((config.stat().st_mtime, _row(kind, find_run_folder(config.parent))))
    return [row for _, row in sorted(found, key=lambda each: each[0], reverse=True)]


def find_run(kind: "RunKind", name: str) -> "ControllerClient | RunFolder":
    """The controller that knows the run, else the run's folder here. Nothing is started.

    ConfigError if there is neither, or the folder is of a run of the other kind.
    """
    from penstock.cli.connection import connect_if_running

    client, local = connect_if_running(), find_local_run(kind, name)
    if client is not None and (local is None or _knows(client, kind, name)):
        return client
    if local is None:
        text = f"no run {name!r} in {PLACES[kind]}/ here, and no controller runs"
        raise ConfigError(f"{text}; see: penstock {kind} list, or start the controller: penstock controller up")
    if kind == "train" and local.kind == "eval":
        raise ConfigError(f"{local.path} is an evaluation; see: penstock eval info {name}")
    if kind == "eval" and local.kind == "train":
        raise ConfigError(f"{local.path} is a training run; see: penstock train info {name}")
    return local


def _knows(client: "ControllerClient", kind: "RunKind", name: str) -> bool:
    try:
        client.run(kind, name)
    except ControllerError as error:
        if error.status != HTTP_NOT_FOUND:
            raise
        return False
    return True


def find_local_run(kind: "RunKind", name: str) -> RunFolder | None:
    """The run of that name, or in that folder; None if there is none."""
    for path in (PLACES[kind] / name, Path(name)):
        if (path / "config.json").is_file():
            return find_run_folder(path)
    return None


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
