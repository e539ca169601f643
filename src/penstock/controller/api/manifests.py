"""Which files of a run can be downloaded, by type, with their exact sizes."""

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson
from starlette.requests import Request

from penstock.controller.api.exports import Exports
from penstock.controller.api.logs import as_text
from penstock.controller.api.progress import Seen, Tried, eval_section
from penstock.controller.api.results import Results, summary
from penstock.controller.api.scores import passed
from penstock.controller.checkpoints import checkpoints_of
from penstock.controller.runs import Kind, Run
from penstock.errors import ControllerError

TYPES: Mapping[Kind, tuple[str, ...]] = {
    "eval": ("metrics", "trajectories", "artifacts", "logs", "report"),
    "train": ("metrics", "logs", "report", "checkpoints"),
}
FARTHEST = 10_000_000
"""The highest row that can be asked for."""
OWN = ("state.json", "optimizer.state", "optimizer.safetensors")
"""Files of a checkpoint that only the trainer reads."""
PLACE = re.compile(r"(?:trajectories|artifacts)/row_(\d{1,8})_run_\d{1,8}[./]")


class Listed(NamedTuple):
    """A file to download."""

    path: str
    """As the client is to name it."""
    size: int
    file: Path
    """Where its bytes are."""


def wanted_types(request: Request, kind: Kind) -> tuple[str, ...]:
    """Of `types=metrics,logs`; ControllerError 400 for an unknown one."""
    given = [part.strip() for part in request.query_params.get("types", "metrics").split(",") if part.strip()]
    if wrong := [each for each in given if each not in TYPES[kind]]:
        text = f"types: {wrong[0][:40]!r} is none of {', '.join(TYPES[kind])}"
        raise ControllerError(text, code="QUERY_INVALID", status=400, details={"field": "types"})
    return tuple(dict.fromkeys(given))


def wanted_rows(request: Request) -> frozenset[int] | None:
    """Of `rows=3,7,10-20`; None for all."""
    text = request.query_params.get("rows", "")
    if not text:
        return None
    found: set[int] = set()
    for part in text.split(","):
        matched = re.fullmatch(r"\s*(\d{1,8})\s*(?:-\s*(\d{1,8})\s*)?", part, re.ASCII)
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (1, 0)
        if last < first or last - first > FARTHEST:
            problem = f"rows = {text[:40]!r}: write rows and ranges from 0 on, such as 3,7,10-20"
            raise ControllerError(problem, code="QUERY_INVALID", status=400, details={"field": "rows"})
        found.update(range(first, last + 1))
    return frozenset(found)


class Manifests:
    """Makes them."""

    def __init__(self, results: Results) -> None:
        self._results = results

    async def of(self, run: Run, exports: Exports, types: Iterable[str], rows: frozenset[int] | None = None) -> list[Listed]:
        """The files that there are now; those that still change are copied, so that they stay as they are told of."""
        seen = await self._results.seen(run) if run.kind == "eval" else None
        found: list[Listed] = []
        for kind in types:
            if kind == "metrics":
                content = await self._metrics(run)
                found.append(await asyncio.to_thread(_copied, exports, "metrics.json", content))
            elif kind == "trajectories" and seen is not None:
                found += await _trajectories(exports, seen, rows)
            elif kind == "artifacts" and seen is not None:
                found += await asyncio.to_thread(_artifacts, exports, seen.ordered(rows))
            elif kind in PLAIN:
                found += await asyncio.to_thread(PLAIN[kind], run, exports)
        return found

    async def one(self, run: Run, exports: Exports, path: str) -> Listed:
        """The file that a manifest calls `path`, as it is now; ControllerError 404."""
        head = path.partition("/")[0]
        types = {"metrics.json": "metrics", "summary.jsonl": "trajectories", "logs.txt": "logs", "report.html": "report"}
        kind, place = types.get(head, head), PLACE.match(path)
        rows = frozenset({int(place[1])}) if place else None
        found = await self.of(run, exports, [kind], rows) if kind in TYPES[run.kind] else []
        for each in found:
            if each.path == path:
                return each
        raise unknown(run, path)

    async def _metrics(self, run: Run) -> bytes:
        if run.kind == "eval":
            content = await self._results.evaluation_metrics(run)
            content["outcome"] = summary(self._results.files(run), run).get("outcome")
        else:
            content = await self._results.training_metrics(run)
            content["summary"] = summary(self._results.files(run), run)
        return orjson.dumps({"name": run.name, **content}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def unknown(run: Run, path: str) -> ControllerError:
    """Of a file that cannot be downloaded."""
    text = f"{run.name} has no file {path[:200]!r}; ask for its manifest again"
    return ControllerError(text, code="OUTPUT_NOT_FOUND", status=404, details={"field": "path"})


async def _trajectories(exports: Exports, seen: Seen, rows: frozenset[int] | None) -> list[Listed]:
    tried, section = seen.ordered(rows), eval_section(exports.files)
    lines = [{**each._asdict(), "passed": passed(each, section), "path": _path(each)} for each in tried]
    text = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    kept = await exports.keep_trajectories(tried)
    short = await asyncio.to_thread(_copied, exports, "summary.jsonl", text)
    return [short, *(_kept(_path(each), file) for each, file in kept.items())]


def _artifacts(exports: Exports, tried: Iterable[Tried]) -> list[Listed]:
    """What agents left in the folders of their rollouts; never a link, which could lead anywhere."""
    found: list[Listed] = []
    root = exports.files.results(exports.run) / "artifacts"
    for each in tried:
        top = root / each.rollout_id
        for folder, _, names in os.walk(top):
            for file in sorted(Path(folder) / name for name in names):
                inside = file.relative_to(top).as_posix()
                if file.is_symlink() or not file.is_file() or inside == "manifest.json" or "\\" in inside:
                    continue
                found.append(_kept(f"artifacts/row_{each.row}_run_{each.place}/{inside}", exports.clean_copy(file)))
    return found


def _logs(run: Run, exports: Exports) -> list[Listed]:
    return [_copied(exports, "logs.txt", as_text(exports.files.log))]


def _report(run: Run, exports: Exports) -> list[Listed]:
    page = exports.files.results(run) / "report.html"
    return [_copied(exports, "report.html", page.read_bytes())] if page.exists() else []


def _checkpoints(run: Run, exports: Exports) -> list[Listed]:
    """Model folders, ready to be used; without what only the trainer reads."""
    found: list[Listed] = []
    for each in checkpoints_of(run, exports.files.results(run)):
        files = [file for file in sorted(each.path.iterdir()) if file.is_file() and file.name not in OWN]
        found += [_kept(f"checkpoints/step-{each.step}/{file.name}", file) for file in files]
    return found


def _path(each: Tried) -> str:
    return f"trajectories/row_{each.row}_run_{each.place}.json"


def _copied(exports: Exports, path: str, content: bytes) -> Listed:
    stem, _, suffix = path.partition(".")
    return _kept(path, exports.keep(stem, f".{suffix}", content))


def _kept(path: str, file: Path) -> Listed:
    return Listed(path, file.stat().st_size, file)


PLAIN = {"logs": _logs, "report": _report, "checkpoints": _checkpoints}
"""Types whose files are there, or not, whatever the run is doing."""
