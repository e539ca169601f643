"""`eval download`: selects, checks and stores the files of an evaluation."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osmosis_ai.cli.connection import Connection
from osmosis_ai.cli.figures import size
from osmosis_ai.cli.output import CliError, Terminal
from osmosis_ai.cli.records import PENDING, Record, below, eval_row
from osmosis_ai.cli.results import Operation
from penstock.controller.downloads import DownloadResult, download_files

ALL = ("metrics", "trajectories", "artifacts", "logs")
DEFAULT = ("metrics", "trajectories")
LARGE = 100 * 1024 * 1024
"""Larger downloads, in bytes, need a confirmation."""
PATHS = {
    "metrics": re.compile(r"metrics\.json"),
    "trajectories": re.compile(r"summary\.jsonl|trajectories/row_\d+_run_\d+\.json"),
    "artifacts": re.compile(r"artifacts/row_\d+_run_\d+/(?!manifest\.json$).+"),
    "logs": re.compile(r"logs\.txt"),
}
ROWS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected files of an evaluation."""

    types: tuple[str, ...]
    rows: str | None
    """Row numbers and ranges, such as `3,7,10-20`; None means all."""

    @classmethod
    def read(cls, types: str, rows: str | None) -> "Selection":
        chosen = {word.strip() for word in types.split(",") if word.strip()}
        if not chosen or chosen - {*ALL, "all"}:
            raise CliError(f"--type {types}: choose out of {', '.join(ALL)}, or all")
        packed = rows.replace(" ", "") if rows is not None else None
        if packed is not None and not ROWS.fullmatch(packed):
            raise CliError(f"--rows {rows}: write row numbers and ranges, such as 3,7,10-20")
        return cls(ALL if "all" in chosen else tuple(one for one in ALL if one in chosen), packed)

    def type_of(self, path: str) -> str | None:
        """Returns the type of a file, or None if the file is not selected or its path is unsafe."""
        fit = (name for name in self.types if PATHS[name].fullmatch(path))
        return None if "\\" in path or ".." in path.split("/") else next(fit, None)


def download_outputs(
    here: Connection, name: str, selection: Selection, terminal: Terminal, *, output: Path | None, overwrite: bool, yes: bool
) -> Operation:
    """Downloads the files. If some fail, the others are still downloaded and the result is `partial`."""
    run = eval_row(here.client.run("eval", name))
    if run.get("status") in PENDING:
        raise CliError(f"The evaluation {run['name']} has not begun; there is nothing to download yet")
    manifest = here.client.manifest("eval", run["id"], types=selection.types, rows=selection.rows)
    listed: list[Record] = manifest.get("files") or []
    files, refused = _sorted_out(listed, selection)
    if not files:
        raise CliError(f"The evaluation {run['name']} has none of these files: {', '.join(selection.types)}", files_failed=refused)
    total = sum(file["size"] for file in files)
    if total > LARGE:
        terminal.confirm(
            f"Download {size(total)}?", yes=yes, summary={"Name": run["name"], "Files": len(files), "Size": size(total)}
        )
    root = output or here.workspace / ".osmosis" / "evals" / _folder_name(run)
    fetched = download_files(here.client, "eval", run["id"], files, root, overwrite=overwrite)
    failed = refused + [{"path": path, "error": error} for path, error in fetched.failed.items()]
    resource = _resource(run, selection, files, fetched) | {"files_failed": failed, "manifest_totals": below(manifest, "totals")}
    outcome = {"status": "partial" if failed else "success", "output_path": str(root), "rows": selection.rows}
    counts = f"{len(fetched.downloaded)} fetched, {len(fetched.skipped)} there already, {len(failed)} failed"
    return Operation(
        operation="eval.download",
        status=outcome["status"] or "",
        message=f"Files of {run['name']} in {root}: {counts}.",
        resource=resource | outcome | here.where,
        hints=[f"{one['path']}: {one['error']}" for one in failed],
        exit_code=1 if failed else 0,
    )


def _sorted_out(listed: list[Record], selection: Selection) -> tuple[list[Record], list[Record]]:
    """Returns the accepted files, and the refused ones with the reason."""
    files: dict[str, Record] = {}
    refused: list[Record] = []
    for file in listed:
        path = str(file.get("path"))
        if path in files:
            refused.append({"path": path, "error": "it is listed twice"})
        elif selection.type_of(path) is None:
            refused.append({"path": path, "error": "no file of the types that were asked for"})
        else:
            files[path] = file
    return list(files.values()), refused


def _resource(run: Record, selection: Selection, files: list[Record], fetched: DownloadResult) -> dict[str, Any]:
    breakdown = {name: {"files": 0, "bytes": 0} for name in selection.types}
    for file in files:
        kind = breakdown[selection.type_of(file["path"]) or ""]
        kind["files"] += 1
        kind["bytes"] += file["size"]
    return {
        "eval_run": {"id": run["id"], "name": run["name"]},
        "selected_types": list(selection.types),
        "files_downloaded": len(fetched.downloaded),
        "files_skipped": len(fetched.skipped),
        "bytes_downloaded": fetched.bytes,
        "total_files": len(files),
        "total_bytes": sum(file["size"] for file in files),
        "breakdown": breakdown,
    }


def _folder_name(run: Record) -> str:
    """Returns the run's name if it is a safe file name, or else a cleaned name with the run's id."""
    name = str(run["name"])
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name).strip('-')}-{run['id']}"
