"""What a run left, for download: a manifest, links, and the files behind them."""

import asyncio
import re
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from penstock.controller.api.bodies import as_table, read_object, reply
from penstock.controller.api.exports import Exports, striking
from penstock.controller.api.links import PATH, Links
from penstock.controller.api.manifests import Listed, Manifests, unknown, wanted_rows, wanted_types
from penstock.controller.api.results import Results
from penstock.controller.api.runs import PATHS
from penstock.controller.runs import Kind, Run, RunFiles
from penstock.controller.stations import Controller
from penstock.errors import ControllerError

MOST = 500
"""Links that are made at once."""
TOKEN = re.compile(r"[a-z]+-[A-Za-z0-9_.-]{1,200}")
"""The name of a copy; never of anything else."""


def routes(controller: Controller, links: Links, results: Results) -> list[Route]:
    """Of both kinds, and where links lead."""
    manifests = Manifests(results)
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

    def __init__(self, controller: Controller, links: Links, manifests: Manifests, kind: Kind) -> None:
        self._controller = controller
        self._links = links
        self._manifests = manifests
        self._kind: Kind = kind

    def routes(self) -> list[Route]:
        """Where what is."""
        path = f"{PATHS[self._kind]}/{{ref}}/samples"
        return [
            Route(f"{path}/manifest", self._manifest, methods=["GET"]),
            Route(f"{path}/download-urls", self._urls, methods=["POST"]),
        ]

    async def _manifest(self, request: Request) -> Response:
        types, rows = wanted_types(request, self._kind), wanted_rows(request)
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

    async def _file(self, run: Run, exports: Exports, path: str, token: str | None) -> Path:
        """The copy that a token names, else the file that goes by this path now."""
        if token is None:
            return (await self._manifests.one(run, exports, path)).file
        file = exports.folder / token
        if not TOKEN.fullmatch(token) or not file.is_file():
            raise unknown(run, path)
        return file

    def _opened(self, request: Request) -> tuple[Run, Exports]:
        run = self._controller.runs.get(self._kind, request.path_params["ref"])
        return run, Exports(run, RunFiles(self._controller.home.runs / run.id), striking(run, self._controller.vault))


def _view(listed: Listed, exports: Exports) -> dict[str, Any]:
    """A copy's name is its token; a file that does not change needs none."""
    token = {"token": listed.file.name} if listed.file.parent == exports.folder else {}
    return {"path": listed.path, "size": listed.size} | token


def _items(body: dict[str, Any]) -> list[tuple[str, str | None]]:
    """`items` of a request: paths and tokens; ControllerError 400."""
    given: object = body.get("items")
    items = cast(list[Any], given) if isinstance(given, list) else []
    if not 1 <= len(items) <= MOST:
        raise _wrong(f"items must be a list of 1 to {MOST} files")
    found: list[tuple[str, str | None]] = []
    for item in items:
        entry = as_table(item)
        path, token = entry.get("path"), entry.get("token")
        if not isinstance(path, str) or not isinstance(token, str | None):
            raise _wrong("each of items must have a path, and a token or none, as in the manifest")
        found.append((path, token))
    return found


def _wrong(text: str) -> ControllerError:
    return ControllerError(f"the request's body: {text}", code="BODY_INVALID", status=400, details={"field": "items"})
