"""Copies of what a run has come to, for downloads: each is written once, never changed, and known by its own name.

A client first learns a file's size and fetches it later, while the run goes on: so what it was told of is kept. No copy holds a
secret of the run.
"""

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from penstock.controller.api.bodies import as_object, read_object, reply
from penstock.controller.api.links import PATH, SignedLinks
from penstock.controller.api.logs import log_text
from penstock.controller.api.results import (
    AttemptSummary,
    EvaluationProgress,
    RunResults,
    eval_section,
    has_passed,
    open_pool,
    run_summary,
)
from penstock.controller.api.runs import PATHS
from penstock.controller.api.views import trajectory
from penstock.controller.checkpoints import checkpoints_of
from penstock.controller.context import Controller
from penstock.controller.runlog import SecretRedactor
from penstock.controller.runs import Run, RunFiles, RunKind
from penstock.controller.vault import Vault
from penstock.errors import ControllerError
from penstock.records import Attempt, Task
from penstock.system.files import write_file

MAX_COPIES = 8
"""Copies of a file that changes, such as the log of a run that goes on; older ones are removed."""
MAX_REDACTED_BYTES = 16 << 20
"""Of an agent's own file that is looked through for secrets."""


@dataclass(frozen=True, slots=True)
class RunExports:
    """Of one run. They are read and written where this is called: in a thread, but for `keep_trajectories`."""

    run: Run
    files: RunFiles
    strike: SecretRedactor | None
    """None where the run has no secrets."""

    @property
    def folder(self) -> Path:
        """Where the copies are."""
        return self.files.path / "exports"

    def keep(self, stem: str, suffix: str, content: bytes) -> Path:
        """A copy of something that may change."""
        content = self._clean(content)
        path = self.folder / f"{stem}-{sha256(content).hexdigest()[:32]}{suffix}"
        if not path.exists():
            self._write(path, content)
            older = sorted(self.folder.glob(f"{stem}-*{suffix}"), key=lambda each: each.stat().st_mtime)
            for each in older[:-MAX_COPIES]:
                each.unlink(missing_ok=True)
        return path

    async def keep_trajectories(self, tried: Iterable[AttemptSummary]) -> dict[AttemptSummary, Path]:
        """A copy of each; what has ended does not change, so that it is made once."""
        wanted = {each: self.folder / f"trajectory-{each.rollout_id}.json" for each in tried}
        missing = [each for each, path in wanted.items() if not path.exists()]
        pool = await asyncio.to_thread(open_pool, self.files.results(self.run)) if missing else None
        if pool is None:
            return {each: path for each, path in wanted.items() if each not in missing}
        try:
            for each in missing:
                attempt, task = await pool.attempt(each.rollout_id), await pool.task(each.rollout_id)
                await asyncio.to_thread(self._keep_trajectory, wanted[each], each.row, task, attempt)
        finally:
            await pool.close()
        return wanted

    def _keep_trajectory(self, path: Path, row: int, task: Task, attempt: Attempt) -> None:
        self._write(path, self._clean(trajectory(self.run, row, task, attempt)))

    def clean_copy(self, file: Path) -> Path:
        """An agent's own file; a copy where it holds a secret."""
        if self.strike is None or file.stat().st_size > MAX_REDACTED_BYTES:
            return file
        content = file.read_bytes()
        if self._clean(content) == content:
            return file
        return self.keep(f"artifact-{sha256(str(file).encode()).hexdigest()[:16]}", "", content)

    def _clean(self, content: bytes) -> bytes:
        if self.strike is None:
            return content
        try:
            return self.strike(content.decode()).encode()
        except UnicodeDecodeError:
            return content

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)


def secret_redactor(run: Run, vault: Vault) -> SecretRedactor | None:
    """What takes the run's secrets out of a text; those that were removed since are not known any more."""
    values: list[str] = []
    for name in run.submission.secrets:
        try:
            values += vault.values([name]).values()
        except ControllerError:
            continue
    return SecretRedactor(values) if values else None


OUTPUT_TYPES: Mapping[RunKind, tuple[str, ...]] = {
    "eval": ("metrics", "trajectories", "artifacts", "logs", "report"),
    "train": ("metrics", "logs", "report", "checkpoints"),
}
MAX_ROW = 10_000_000
"""The highest row that can be asked for."""
TRAINER_FILES = ("state.json", "optimizer.state", "optimizer.safetensors")
"""Files of a checkpoint that only the trainer reads."""
ATTEMPT_PATH = re.compile(r"(?:trajectories|artifacts)/row_(\d{1,8})_run_\d{1,8}[./]")


class OutputFile(NamedTuple):
    """A file to download."""

    path: str
    """As the client is to name it."""
    size: int
    file: Path
    """Where its bytes are."""


def requested_types(request: Request, kind: RunKind) -> tuple[str, ...]:
    """Of `types=metrics,logs`; ControllerError 400 for an unknown one."""
    given = [part.strip() for part in request.query_params.get("types", "metrics").split(",") if part.strip()]
    if wrong := [each for each in given if each not in OUTPUT_TYPES[kind]]:
        text = f"types: {wrong[0][:40]!r} is none of {', '.join(OUTPUT_TYPES[kind])}"
        raise ControllerError(text, code="QUERY_INVALID", status=400, details={"field": "types"})
    return tuple(dict.fromkeys(given))


def requested_rows(request: Request) -> frozenset[int] | None:
    """Of `rows=3,7,10-20`; None for all."""
    text = request.query_params.get("rows", "")
    if not text:
        return None
    found: set[int] = set()
    for part in text.split(","):
        matched = re.fullmatch(r"\s*(\d{1,8})\s*(?:-\s*(\d{1,8})\s*)?", part, re.ASCII)
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (1, 0)
        if last < first or last - first > MAX_ROW:
            problem = f"rows = {text[:40]!r}: write rows and ranges from 0 on, such as 3,7,10-20"
            raise ControllerError(problem, code="QUERY_INVALID", status=400, details={"field": "rows"})
        found.update(range(first, last + 1))
    return frozenset(found)


class ManifestBuilder:
    def __init__(self, results: RunResults) -> None:
        self._results = results

    async def of(self, run: Run, exports: RunExports, types: Iterable[str], rows: frozenset[int] | None = None) -> list[OutputFile]:
        """The files that there are now; those that still change are copied, so that they stay as they are told of."""
        seen = await self._results.seen(run) if run.kind == "eval" else None
        found: list[OutputFile] = []
        for kind in types:
            if kind == "metrics":
                content = await self._metrics(run)
                found.append(await asyncio.to_thread(_copy_output, exports, "metrics.json", content))
            elif kind == "trajectories" and seen is not None:
                found += await _trajectories(exports, seen, rows)
            elif kind == "artifacts" and seen is not None:
                found += await asyncio.to_thread(_artifacts, exports, seen.ordered(rows))
            elif kind in FILE_TYPES:
                found += await asyncio.to_thread(FILE_TYPES[kind], run, exports)
        return found

    async def one(self, run: Run, exports: RunExports, path: str) -> OutputFile:
        """The file that a manifest calls `path`, as it is now; ControllerError 404."""
        head = path.partition("/")[0]
        types = {"metrics.json": "metrics", "summary.jsonl": "trajectories", "logs.txt": "logs", "report.html": "report"}
        kind, place = types.get(head, head), ATTEMPT_PATH.match(path)
        rows = frozenset({int(place[1])}) if place else None
        found = await self.of(run, exports, [kind], rows) if kind in OUTPUT_TYPES[run.kind] else []
        for each in found:
            if each.path == path:
                return each
        raise unknown_output(run, path)

    async def _metrics(self, run: Run) -> bytes:
        if run.kind == "eval":
            content = await self._results.evaluation_metrics(run)
            content["outcome"] = run_summary(self._results.files(run), run).get("outcome")
        else:
            content = await self._results.training_metrics(run)
            content["summary"] = run_summary(self._results.files(run), run)
        return orjson.dumps({"name": run.name, **content}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def unknown_output(run: Run, path: str) -> ControllerError:
    """Of a file that cannot be downloaded."""
    text = f"{run.name} has no file {path[:200]!r}; ask for its manifest again"
    return ControllerError(text, code="OUTPUT_NOT_FOUND", status=404, details={"field": "path"})


async def _trajectories(exports: RunExports, seen: EvaluationProgress, rows: frozenset[int] | None) -> list[OutputFile]:
    tried, section = seen.ordered(rows), eval_section(exports.files)
    lines = [{**each._asdict(), "passed": has_passed(each, section), "path": _trajectory_path(each)} for each in tried]
    text = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    kept = await exports.keep_trajectories(tried)
    short = await asyncio.to_thread(_copy_output, exports, "summary.jsonl", text)
    return [short, *(_output_file(_trajectory_path(each), file) for each, file in kept.items())]


def _artifacts(exports: RunExports, tried: Iterable[AttemptSummary]) -> list[OutputFile]:
    """What agents left in the folders of their rollouts; never a link, which could lead anywhere."""
    found: list[OutputFile] = []
    root = exports.files.results(exports.run) / "artifacts"
    for each in tried:
        top = root / each.rollout_id
        for folder, _, names in os.walk(top):
            for file in sorted(Path(folder) / name for name in names):
                inside = file.relative_to(top).as_posix()
                if file.is_symlink() or not file.is_file() or inside == "manifest.json" or "\\" in inside:
                    continue
                found.append(_output_file(f"artifacts/row_{each.row}_run_{each.place}/{inside}", exports.clean_copy(file)))
    return found


def _logs(run: Run, exports: RunExports) -> list[OutputFile]:
    return [_copy_output(exports, "logs.txt", log_text(exports.files.log))]


def _report(run: Run, exports: RunExports) -> list[OutputFile]:
    page = exports.files.results(run) / "report.html"
    return [_copy_output(exports, "report.html", page.read_bytes())] if page.exists() else []


def _checkpoints(run: Run, exports: RunExports) -> list[OutputFile]:
    """Model folders, ready to be used; without what only the trainer reads."""
    found: list[OutputFile] = []
    for each in checkpoints_of(run, exports.files.results(run)):
        files = [file for file in sorted(each.path.iterdir()) if file.is_file() and file.name not in TRAINER_FILES]
        found += [_output_file(f"checkpoints/step-{each.step}/{file.name}", file) for file in files]
    return found


def _trajectory_path(each: AttemptSummary) -> str:
    return f"trajectories/row_{each.row}_run_{each.place}.json"


def _copy_output(exports: RunExports, path: str, content: bytes) -> OutputFile:
    stem, _, suffix = path.partition(".")
    return _output_file(path, exports.keep(stem, f".{suffix}", content))


def _output_file(path: str, file: Path) -> OutputFile:
    return OutputFile(path, file.stat().st_size, file)


FILE_TYPES = {"logs": _logs, "report": _report, "checkpoints": _checkpoints}
"""Types whose files are there, or not, whatever the run is doing."""


MAX_LINKS = 500
"""Links that are made at once."""
COPY_NAME = re.compile(r"[a-z]+-[A-Za-z0-9_.-]{1,200}")
"""The name of a copy; never of anything else."""


def routes(controller: Controller, links: SignedLinks, results: RunResults) -> list[Route]:
    """Of both kinds, and where links lead."""
    manifests = ManifestBuilder(results)
    both = [route for kind in PATHS for route in OutputRoutes(controller, links, manifests, kind).routes()]

    async def file(request: Request) -> Response:
        path = controller.home.runs / request.state.link["run"] / request.state.link["file"]
        if not path.is_file():
            raise ControllerError("this file is gone; ask for the manifest again", code="OUTPUT_NOT_FOUND", status=404)
        headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff", "cache-control": "no-store"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    return [*both, Route(f"{PATH}/output/{{token}}", file, methods=["GET"])]


class OutputRoutes:
    """Of one kind of run."""

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
        run, exports = await asyncio.to_thread(self._opened, request)
        listed = await self._manifests.of(run, exports, types, rows)
        files = [_view(each, exports) for each in listed]
        return reply({"files": files, "totals": {"files": len(files), "bytes": sum(each.size for each in listed)}})

    async def _urls(self, request: Request) -> Response:
        items = _items(await read_object(request))
        run, exports = await asyncio.to_thread(self._opened, request)
        made: list[dict[str, Any]] = []
        for path, token in items:
            file = await self._file(run, exports, path, token)
            url = self._links.make("output", run=run.id, file=file.relative_to(exports.files.path).as_posix())
            made.append({"path": path, "url": url} | ({"token": token} if token else {}))
        return reply({"items": made, "expires_in": int(self._links.lifetime_s)})

    async def _file(self, run: Run, exports: RunExports, path: str, token: str | None) -> Path:
        """The copy that a token names, else the file that goes by this path now."""
        if token is None:
            return (await self._manifests.one(run, exports, path)).file
        file = exports.folder / token
        if not COPY_NAME.fullmatch(token) or not file.is_file():
            raise unknown_output(run, path)
        return file

    def _opened(self, request: Request) -> tuple[Run, RunExports]:
        run = self._controller.runs.get(self._kind, request.path_params["ref"])
        return run, RunExports(run, RunFiles(self._controller.home.runs / run.id), secret_redactor(run, self._controller.vault))


def _view(listed: OutputFile, exports: RunExports) -> dict[str, Any]:
    """A copy's name is its token; a file that does not change needs none."""
    token = {"token": listed.file.name} if listed.file.parent == exports.folder else {}
    return {"path": listed.path, "size": listed.size} | token


def _items(body: dict[str, Any]) -> list[tuple[str, str | None]]:
    """`items` of a request: paths and tokens; ControllerError 400."""
    given: object = body.get("items")
    items = cast(list[Any], given) if isinstance(given, list) else []
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
