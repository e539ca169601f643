"""Downloads of a run's outputs: manifests of its files, and signed links to them.

A client reads a manifest first and downloads the files later, while the run may continue. Files that still change are therefore
copied; a copy is never changed, and its name is the file's token in the manifest. Copies hold no secret of the run.
"""

import asyncio
import os
import re
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.config import RunKind
from penstock.errors import ControllerError
from penstock.records import Rollout, Task
from penstock.system.files import open_inside, read_inside, write_file
from penstock_controller.api.bodies import as_object, read_object, reply
from penstock_controller.api.links import PATH, SignedLinks
from penstock_controller.api.logs import log_text
from penstock_controller.api.results import (
    AttemptSummary,
    EvaluationProgress,
    RunResults,
    eval_section,
    has_passed,
    open_pool,
    run_summary,
    trajectory,
)
from penstock_controller.api.runs import PATHS
from penstock_controller.checkpoints import checkpoints_of
from penstock_controller.context import Controller
from penstock_controller.runlog import SecretRedactor
from penstock_controller.runs import Run, RunFiles
from penstock_controller.vault import Vault

OUTPUT_TYPES: Mapping[RunKind, tuple[str, ...]] = {
    "eval": ("metrics", "trajectories", "artifacts", "logs", "report"),
    "train": ("metrics", "logs", "report", "checkpoints"),
}
MAX_COPIES = 8
"""Copies of a file that changes, such as the log; older ones are removed."""
MAX_REDACTED_BYTES = 16 << 20
"""Larger artifacts are not searched for secrets."""
MAX_ROW_RANGES = 1000
"""Rows and ranges in a query."""
MAX_LINKS = 500
"""Links per request."""
TRAINER_FILES = ("state.json", "optimizer.state", "optimizer.safetensors")
"""Files of a checkpoint that only the trainer needs."""
ATTEMPT_PATH = re.compile(r"(?:trajectories|artifacts)/row_(\d{1,8})_run_\d{1,8}[./]")
COPY_NAME = re.compile(r"[a-z]+-[A-Za-z0-9_.-]{1,200}")
"""Matches the name of a copy; no other path."""


# Copies.


@dataclass(frozen=True, slots=True)
class RunExports:
    """The copies of one run's outputs. Methods block on files: call them in a thread, except `copy_trajectories`."""

    run: Run
    files: RunFiles
    redact: SecretRedactor | None
    """None if the run has no secrets."""

    @property
    def folder(self) -> Path:
        return self.files.path / "exports"

    def copy(self, stem: str, suffix: str, content: bytes) -> Path:
        """Returns a copy of content that may change, named by its SHA-256."""
        content = self._redacted(content)
        path = self.folder / f"{stem}-{sha256(content).hexdigest()[:32]}{suffix}"
        if not path.exists():
            self._write(path, content)
            older = sorted(self.folder.glob(f"{stem}-*{suffix}"), key=lambda each: each.stat().st_mtime)
            for each in older[:-MAX_COPIES]:
                each.unlink(missing_ok=True)
        return path

    async def copy_trajectories(self, attempts: Iterable[AttemptSummary]) -> dict[AttemptSummary, Path]:
        """Returns a file for each attempt; written once, since an ended attempt does not change."""
        paths = {each: self.folder / f"trajectory-{each.rollout_id}.json" for each in attempts}
        missing = [each for each, path in paths.items() if not path.exists()]
        pool = await asyncio.to_thread(open_pool, self.run, self.files) if missing else None
        if pool is None:
            return {each: path for each, path in paths.items() if each not in missing}
        try:
            for each in missing:
                attempt, task = await pool.rollout(each.rollout_id), await pool.task(each.rollout_id)
                await asyncio.to_thread(self._write_trajectory, paths[each], each.row, task, attempt)
        finally:
            await pool.close()
        return paths

    def _write_trajectory(self, path: Path, row: int, task: Task, attempt: Rollout) -> None:
        self._write(path, self._redacted(trajectory(self.run, row, task, attempt)))

    def without_secrets(self, file: Path) -> Path:
        """Returns an artifact, or a redacted copy if it holds a secret."""
        if self.redact is None or file.stat().st_size > MAX_REDACTED_BYTES:
            return file
        content = read_inside(self.files.path, file)
        if self._redacted(content) == content:
            return file
        return self.copy(f"artifact-{sha256(str(file).encode()).hexdigest()[:16]}", "", content)

    def _redacted(self, content: bytes) -> bytes:
        if self.redact is None:
            return content
        try:
            return self.redact(content.decode()).encode()
        except UnicodeDecodeError:
            return content

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)


def secret_redactor(run: Run, vault: Vault) -> SecretRedactor | None:
    """Returns a redactor for the run's secrets; None if it has none. Secrets that were deleted since are unknown."""
    values: list[str] = []
    for name in run.submission.secrets:
        try:
            values += vault.values([name], person=run.submission.person).values()
        except ControllerError:
            continue
    return SecretRedactor(values) if values else None


# Manifests.


class OutputFile(NamedTuple):
    """A file in a manifest."""

    path: str
    """The path for the client."""
    size: int
    file: Path
    """The file or its copy."""


BuiltOutputs = dict[tuple[str, range | None], dict[str, OutputFile]]
"""Outputs by path, of a type and the rows asked for."""


class ManifestBuilder:
    def __init__(self, results: RunResults) -> None:
        self._results = results

    async def build(
        self, run: Run, exports: RunExports, types: Iterable[str], rows: Container[int] | None = None
    ) -> list[OutputFile]:
        """Returns the present files of these types; copies those that still change."""
        progress = await self._results.evaluation(run) if run.kind == "eval" else None
        found: list[OutputFile] = []
        for kind in types:
            if kind == "metrics":
                content = await self._metrics(run)
                found.append(await asyncio.to_thread(_copy_output, exports, "metrics.json", content))
            elif kind == "trajectories" and progress is not None:
                found += await _trajectories(exports, progress, rows)
            elif kind == "artifacts" and progress is not None:
                found += await asyncio.to_thread(_artifacts, exports, progress.ordered(rows))
            elif kind in FILE_TYPES:
                found += await asyncio.to_thread(FILE_TYPES[kind], run, exports)
        return found

    async def find(self, run: Run, exports: RunExports, path: str, built: BuiltOutputs) -> OutputFile:
        """Returns the present file of this manifest path; ControllerError 404 if there is none. `built` keeps what was built."""
        head = path.partition("/")[0]
        types = {"metrics.json": "metrics", "summary.jsonl": "trajectories", "logs.txt": "logs", "report.html": "report"}
        kind, attempt = types.get(head, head), ATTEMPT_PATH.match(path)
        rows = range(int(attempt[1]), int(attempt[1]) + 1) if attempt else None
        if (kind, rows) not in built:
            outputs = await self.build(run, exports, [kind], rows) if kind in OUTPUT_TYPES[run.kind] else []
            built[kind, rows] = {each.path: each for each in outputs}
        if path not in built[kind, rows]:
            raise unknown_output(run, path)
        return built[kind, rows][path]

    async def _metrics(self, run: Run) -> bytes:
        if run.kind == "eval":
            content = await self._results.evaluation_metrics(run)
            content["outcome"] = run_summary(self._results.files(run), run).get("outcome")
        else:
            content = await self._results.training_metrics(run)
            content["summary"] = run_summary(self._results.files(run), run)
        return orjson.dumps({"name": run.name, **content}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def unknown_output(run: Run, path: str) -> ControllerError:
    text = f"{run.name} has no file {path[:200]!r}; ask for its manifest again"
    return ControllerError(text, code="OUTPUT_NOT_FOUND", status=404, details={"field": "path"})


async def _trajectories(exports: RunExports, progress: EvaluationProgress, rows: Container[int] | None) -> list[OutputFile]:
    attempts, section = progress.ordered(rows), eval_section(exports.files)
    lines = [{**each._asdict(), "passed": has_passed(each, section), "path": _trajectory_path(each)} for each in attempts]
    text = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    copies = await exports.copy_trajectories(attempts)
    summary = await asyncio.to_thread(_copy_output, exports, "summary.jsonl", text)
    return [summary, *(_output_file(_trajectory_path(each), file) for each, file in copies.items())]


def _artifacts(exports: RunExports, attempts: Iterable[AttemptSummary]) -> list[OutputFile]:
    """Returns the files that agents left in their rollouts' folders; no symbolic links, which could lead anywhere."""
    found: list[OutputFile] = []
    root = exports.files.results(exports.run) / "artifacts"
    for each in attempts:
        top = root / each.rollout_id
        for folder, _, names in os.walk(top) if exports.files.holds(top) else ():
            for file in sorted(Path(folder) / name for name in names):
                inside = file.relative_to(top).as_posix()
                if file.is_symlink() or not file.is_file() or inside == "manifest.json" or "\\" in inside:
                    continue
                found.append(_output_file(f"artifacts/row_{each.row}_run_{each.place}/{inside}", exports.without_secrets(file)))
    return found


def _logs(run: Run, exports: RunExports) -> list[OutputFile]:
    return [_copy_output(exports, "logs.txt", log_text(exports.files.log))]


def _report(run: Run, exports: RunExports) -> list[OutputFile]:
    page = exports.files.results(run) / "report.html"
    try:
        return [_copy_output(exports, "report.html", read_inside(exports.files.path, page))]
    except OSError:  # there is none yet, or the run's code has put something else there
        return []


def _checkpoints(run: Run, exports: RunExports) -> list[OutputFile]:
    """Returns the files of model folders, without those that only the trainer needs."""
    found: list[OutputFile] = []
    for each in checkpoints_of(run, exports.files.results(run)):
        files = [file for file in sorted(each.path.rglob("*")) if file.is_file() and file.name not in TRAINER_FILES]
        files = [file for file in files if exports.files.holds(file) and not file.is_symlink()]
        names = [file.relative_to(each.path).as_posix() for file in files]  # below the name of a policy, where there are several
        found += [_output_file(f"checkpoints/step-{each.step}/{name}", file) for name, file in zip(names, files, strict=True)]
    return found


FILE_TYPES = {"logs": _logs, "report": _report, "checkpoints": _checkpoints}
"""Types whose files do not depend on the run's progress."""


def _trajectory_path(each: AttemptSummary) -> str:
    return f"trajectories/row_{each.row}_run_{each.place}.json"


def _copy_output(exports: RunExports, path: str, content: bytes) -> OutputFile:
    stem, _, suffix = path.partition(".")
    return _output_file(path, exports.copy(stem, f".{suffix}", content))


def _output_file(path: str, file: Path) -> OutputFile:
    return OutputFile(path, file.stat().st_size, file)


# Routes.


class OpenedFileResponse(FileResponse):
    """Sends a file that is open, whatever its name stands for by now, and closes it."""

    def __init__(self, file: BinaryIO) -> None:
        headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff", "cache-control": "no-store"}
        path, found = f"/dev/fd/{file.fileno()}", os.fstat(file.fileno())
        super().__init__(path, stat_result=found, media_type="application/octet-stream", headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def routes(controller: Controller, links: SignedLinks, results: RunResults) -> list[Route]:
    manifests = ManifestBuilder(results)
    both = [route for kind in PATHS for route in OutputRoutes(controller, links, manifests, kind).routes()]

    async def file(request: Request) -> Response:
        folder = controller.home.runs / request.state.link["run"]
        try:
            opened = await asyncio.to_thread(open_inside, folder, folder / request.state.link["file"])
        except OSError as cause:
            text = "this file is gone; ask for the manifest again"
            raise ControllerError(text, code="OUTPUT_NOT_FOUND", status=404) from cause
        return OpenedFileResponse(opened)

    return [*both, Route(f"{PATH}/output/{{token}}", file, methods=["GET"])]


class OutputRoutes:
    """Routes for one kind of run."""

    def __init__(self, controller: Controller, links: SignedLinks, manifests: ManifestBuilder, kind: RunKind) -> None:
        self._controller = controller
        self._links = links
        self._manifests = manifests
        self._kind: RunKind = kind

    def routes(self) -> list[Route]:
        path = f"{PATHS[self._kind]}/{{ref}}/samples"
        return [
            Route(f"{path}/manifest", self._manifest, methods=["GET"]),
            Route(f"{path}/download-urls", self._urls, methods=["POST"]),
        ]

    async def _manifest(self, request: Request) -> Response:
        types, rows = requested_types(request, self._kind), requested_rows(request)
        run, exports = await asyncio.to_thread(self._open_run, request)
        outputs = await self._manifests.build(run, exports, types, rows)
        files = [_view(each, exports) for each in outputs]
        return reply({"files": files, "totals": {"files": len(files), "bytes": sum(each.size for each in outputs)}})

    async def _urls(self, request: Request) -> Response:
        items = _items(await read_object(request))
        run, exports = await asyncio.to_thread(self._open_run, request)
        links: list[dict[str, Any]] = []
        built: BuiltOutputs = {}
        for path, token in items:
            file = await self._file(run, exports, path, token, built)
            url = self._links.create("output", run=run.id, file=file.relative_to(exports.files.path).as_posix())
            links.append({"path": path, "url": url} | ({"token": token} if token else {}))
        return reply({"items": links, "expires_in": int(self._links.lifetime_s)})

    async def _file(self, run: Run, exports: RunExports, path: str, token: str | None, built: BuiltOutputs) -> Path:
        """Returns the copy that a token names, else the present file of this path."""
        if token is None:
            return (await self._manifests.find(run, exports, path, built)).file
        file = exports.folder / token
        if not COPY_NAME.fullmatch(token) or not file.is_file():
            raise unknown_output(run, path)
        return file

    def _open_run(self, request: Request) -> tuple[Run, RunExports]:
        run = self._controller.runs.get(self._kind, request.path_params["ref"])
        return run, RunExports(run, RunFiles(self._controller.home.runs / run.id), secret_redactor(run, self._controller.vault))


def _view(output: OutputFile, exports: RunExports) -> dict[str, Any]:
    """Returns a manifest entry. A copy's name is its token; a file that does not change needs none."""
    token = {"token": output.file.name} if output.file.parent == exports.folder else {}
    return {"path": output.path, "size": output.size} | token


def requested_types(request: Request, kind: RunKind) -> tuple[str, ...]:
    """Reads `types=metrics,logs`; ControllerError 400 for an unknown type."""
    types = [part.strip() for part in request.query_params.get("types", "metrics").split(",") if part.strip()]
    if wrong := [each for each in types if each not in OUTPUT_TYPES[kind]]:
        text = f"types: {wrong[0][:40]!r} is none of {', '.join(OUTPUT_TYPES[kind])}"
        raise ControllerError(text, code="QUERY_INVALID", status=400, details={"field": "types"})
    return tuple(dict.fromkeys(types))


class RowRanges:
    """Rows of a dataset as ranges, which may overlap and be of any length."""

    def __init__(self, ranges: Iterable[range]) -> None:
        self._merged: list[range] = []
        for each in sorted(ranges, key=lambda each: each.start):
            if self._merged and each.start <= self._merged[-1].stop:
                self._merged[-1] = range(self._merged[-1].start, max(self._merged[-1].stop, each.stop))
            else:
                self._merged.append(each)

    def __contains__(self, row: object) -> bool:
        place = bisect_right(self._merged, row, key=lambda each: each.start) if isinstance(row, int) else 0
        return place > 0 and row in self._merged[place - 1]


def requested_rows(request: Request) -> RowRanges | None:
    """Reads `rows=3,7,10-20`; None for all rows."""
    text = request.query_params.get("rows", "")
    if not text:
        return None
    parts = text.split(",")
    if len(parts) > MAX_ROW_RANGES:
        raise _invalid_rows(f"rows has {len(parts)} rows and ranges; give at most {MAX_ROW_RANGES}, or leave it out for all")
    return RowRanges(_row_range(part, text) for part in parts)


def _row_range(part: str, text: str) -> range:
    matched = re.fullmatch(r"\s*(\d{1,8})\s*(?:-\s*(\d{1,8})\s*)?", part, re.ASCII)
    first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (1, 0)
    if last < first:
        raise _invalid_rows(f"rows = {text[:40]!r}: write rows and ranges from 0 to 99999999, such as 3,7,10-20")
    return range(first, last + 1)


def _invalid_rows(problem: str) -> ControllerError:
    return ControllerError(problem, code="QUERY_INVALID", status=400, details={"field": "rows"})


def _items(body: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Returns paths and tokens of `items`; ControllerError 400 if they are invalid."""
    value: object = body.get("items")
    items = cast(list[Any], value) if isinstance(value, list) else []
    if not 1 <= len(items) <= MAX_LINKS:
        raise _invalid_body(f"items must be a list of 1 to {MAX_LINKS} files")
    found: list[tuple[str, str | None]] = []
    for item in items:
        entry = as_object(item)
        path, token = entry.get("path"), entry.get("token")
        if not isinstance(path, str) or not isinstance(token, str | None):
            raise _invalid_body("each of items must have a path, and a token or none, as in the manifest")
        found.append((path, token))
    return found


def _invalid_body(text: str) -> ControllerError:
    return ControllerError(f"the request's body: {text}", code="BODY_INVALID", status=400, details={"field": "items"})
