"""Code as it travels with a submission: an archive, known by its SHA-256."""

import asyncio
import secrets
from collections.abc import AsyncIterable
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.controller.api.bodies import reply, too_large
from penstock.controller.api.links import Links
from penstock.controller.api.submissions import snapshot_path
from penstock.controller.stations import Controller
from penstock.errors import ControllerError


def routes(controller: Controller, links: Links) -> list[Route]:
    """One."""
    largest = controller.limits.snapshot_mb * 1_000_000

    async def put(request: Request) -> Response:
        """201, or 200 where it was here already; nothing is kept of one that is not what its name says."""
        digest: str = request.path_params["digest"]
        path = snapshot_path(controller, digest)
        known = path.exists()
        draft = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        try:
            found = await _receive(request.stream(), None if known else draft, largest)
            if found != digest:
                text = f"the archive's SHA-256 is {found}, not {digest}; it was changed on the way: send it again"
                raise ControllerError(text, code="SNAPSHOT_MISMATCH", status=400)
            if not known:
                await asyncio.to_thread(draft.replace, path)
        finally:
            await asyncio.to_thread(draft.unlink, missing_ok=True)
        return reply({"snapshot": digest, "size": path.stat().st_size}, 200 if known else 201)

    return [Route("/api/cli/snapshots/{digest}", put, methods=["PUT"])]


async def _receive(stream: AsyncIterable[bytes], draft: Path | None, largest: int) -> str:
    """The SHA-256 of what comes, which is written to `draft` where there is one."""
    digest, size = sha256(), 0
    out = None if draft is None else await asyncio.to_thread(draft.open, "wb")
    try:
        async for part in stream:
            size += len(part)
            if size > largest:
                raise too_large(largest)
            digest.update(part)
            if out is not None:
                await asyncio.to_thread(out.write, part)
    finally:
        if out is not None:
            out.close()
    return digest.hexdigest()
