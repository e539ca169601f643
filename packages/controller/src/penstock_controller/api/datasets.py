"""Routes for datasets: uploads and downloads by signed links, details and logs."""

import asyncio
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from penstock.errors import ControllerError
from penstock_controller.api.bodies import int_param, page_reply, page_request, read_object, reply, string_field
from penstock_controller.api.links import PATH, SignedLinks
from penstock_controller.context import Controller
from penstock_controller.datasets import Dataset, preview
from penstock_controller.identity import require_own

BASE = "/api/cli/datasets"


def routes(controller: Controller, links: SignedLinks) -> list[Route]:
    handlers = DatasetRoutes(controller, links)
    return [
        Route(BASE, handlers.begin, methods=["POST"]),
        Route(BASE, handlers.list_datasets, methods=["GET"]),
        Route(f"{BASE}/{{ref}}", handlers.show, methods=["GET"]),
        Route(f"{BASE}/{{ref}}/complete", handlers.complete, methods=["POST"]),
        Route(f"{BASE}/{{ref}}/abort", handlers.abort, methods=["POST"]),
        Route(f"{BASE}/{{ref}}/download", handlers.download, methods=["GET"]),
        Route(f"{BASE}/{{ref}}/logs", handlers.logs, methods=["GET"]),
        Route(f"{PATH}/dataset-upload/{{token}}", handlers.upload, methods=["PUT"]),
        Route(f"{PATH}/dataset/{{token}}", handlers.file, methods=["GET"]),
    ]


class DatasetRoutes:
    def __init__(self, controller: Controller, links: SignedLinks) -> None:
        self._datasets = controller.datasets
        self._links = links

    async def begin(self, request: Request) -> Response:
        """Starts an upload. `upload` of the reply describes one PUT of the whole file, to a link for this upload only."""
        body = await read_object(request)
        name, extension, size = string_field(body, "file_name"), string_field(body, "extension"), body.get("file_size")
        if not isinstance(size, int) or isinstance(size, bool):
            raise _invalid_body("file_size must be a whole number of bytes", "file_size")
        replaced = string_field(body, "overwrite_dataset_id") if body.get("overwrite_dataset_id") is not None else None
        dataset = await asyncio.to_thread(
            self._datasets.begin, name, size, extension.lower().lstrip("."), replaced, who=request.state.who
        )
        upload = self._datasets.upload(dataset.id)
        assert upload is not None, "begin has created it"
        url = self._links.create("dataset-upload", dataset=dataset.id, key=upload.key)
        simple: dict[str, Any] = {
            "method": "simple",
            "s3_key": f"{dataset.id}/{upload.key}",
            "presigned_url": url,
            "upload_headers": {},
        }
        return reply(_record(dataset) | {"upload": simple | {"expires_in": int(self._links.lifetime_s)}}, 201)

    async def upload(self, request: Request) -> Response:
        link = request.state.link
        await self._datasets.receive(link["dataset"], request.stream(), key=link["key"])
        return Response(status_code=204)

    async def complete(self, request: Request) -> Response:
        """Returns the dataset after its validation; as `processing` if that takes long."""
        body = await read_object(request)
        extension = string_field(body, "file_extension") if body.get("file_extension") is not None else None
        return reply(_record(await self._datasets.complete(self._own(request), extension)))

    async def abort(self, request: Request) -> Response:
        return reply(_record(await asyncio.to_thread(self._datasets.abort, self._own(request))))

    def _own(self, request: Request) -> str:
        """Returns the id of the dataset that the caller may change; ControllerError 403 if it is another's."""
        found = self._datasets.get(request.path_params["ref"])
        require_own(request.state.who, found.person, f"the dataset {found.name!r}")
        return found.id

    async def list_datasets(self, request: Request) -> Response:
        limit, offset = page_request(request)
        found, total = await asyncio.to_thread(self._datasets.page, limit=limit, offset=offset)
        return page_reply("datasets", [_record(each) for each in found], total, limit, offset)

    async def show(self, request: Request) -> Response:
        found = self._datasets.get(request.path_params["ref"])
        rows = await asyncio.to_thread(preview, found.path) if found.digest else None
        return reply(_record(found) | {"data_preview": rows})

    async def download(self, request: Request) -> Response:
        """Returns a link to the present content; it stays valid if the dataset is replaced."""
        found = self._datasets.get(request.path_params["ref"])
        if found.digest is None:
            text = f"dataset {found.name!r} has no content: it is {found.status}{f' ({found.message})' if found.message else ''}"
            raise ControllerError(text, code="DATASET_NOT_READY", status=409)
        name = f"{found.name}.{found.extension}"
        url = self._links.create("dataset", dataset=found.id, file=found.path.name, name=name)
        return reply({"presigned_url": url, "expires_in": int(self._links.lifetime_s), "file_name": name})

    async def file(self, request: Request) -> Response:
        link = request.state.link
        path = self._datasets.get(link["dataset"]).path.with_name(link["file"])
        if not path.is_file():
            raise ControllerError("the dataset's file is gone; upload it again", code="DATASET_NOT_FOUND", status=404)
        plain = link["name"].encode("ascii", "replace").decode().replace('"', "_").replace("?", "_")
        disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(link['name'], safe='')}"
        headers = {"content-disposition": disposition, "x-content-type-options": "nosniff", "cache-control": "no-store"}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    async def logs(self, request: Request) -> Response:
        found = self._datasets.get(request.path_params["ref"])
        limit, direction = int_param(request, "limit", 50, low=1, high=200), request.query_params.get("direction", "older")
        if direction not in ("older", "newer"):
            raise _invalid_body(f"direction = {direction[:40]!r}: give older or newer", "direction")
        cursor, newer = request.query_params.get("cursor"), direction == "newer"
        page = await asyncio.to_thread(self._datasets.logs.page, found.id, limit=limit, cursor=cursor, newer=newer)
        return reply({"logs": page.entries, "next_cursor": page.next_cursor})


def _record(dataset: Dataset) -> dict[str, Any]:
    return {
        "id": dataset.id,
        "file_name": dataset.name,
        "file_size": dataset.size,
        "status": dataset.status,
        "file_format": dataset.extension,
        "original_file_format": dataset.extension,
        "row_count": dataset.rows,
        "original_file_size": dataset.size,
        "creator_name": dataset.creator or None,
        "created_at": dataset.created_at,
        "updated_at": dataset.updated_at,
        "df_stats": None,
        "digest": dataset.digest,
        "message": dataset.message or None,
    }


def _invalid_body(message: str, field: str) -> ControllerError:
    return ControllerError(message, code="BODY_INVALID", status=400, details={"field": field})
