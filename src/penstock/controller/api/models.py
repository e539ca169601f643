"""Models over HTTP: those to begin with, those that runs have trained, and which of them are served."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.controller.api.bodies import page_reply, page_request, read_object, reply, string_field
from penstock.controller.api.links import SignedLinks
from penstock.controller.checkpoints import Checkpoint, PretrainedModel
from penstock.controller.context import Controller
from penstock.controller.deployments import Deployment

BASE = "/api/cli/models"


def routes(controller: Controller, links: SignedLinks) -> list[Route]:
    """Where what is; a name with a slash arrives as one segment."""
    station = ModelRoutes(controller)
    return [
        Route(f"{BASE}/base", station.base, methods=["GET"]),
        Route(f"{BASE}/lora", station.trained, methods=["GET"]),
        Route(f"{BASE}/{{name}}", station.shown, methods=["GET"]),
        Route(f"{BASE}/{{name}}/deploy", station.deploy, methods=["POST"]),
        Route(f"{BASE}/{{name}}/undeploy", station.undeploy, methods=["POST"]),
    ]


class ModelRoutes:
    def __init__(self, controller: Controller) -> None:
        self._deployments = controller.deployments

    async def base(self, request: Request) -> Response:
        """A page of models that no run has trained."""
        limit, offset = page_request(request)
        found = await asyncio.to_thread(self._deployments.catalogue.base)
        rows = [_base_record(model) | self._serving(model.name) for model in found[offset : offset + limit]]
        return page_reply("models", rows, len(found), limit, offset, more=self._counts())

    async def trained(self, request: Request) -> Response:
        """A page of checkpoints, with how many models may be served beside it."""
        limit, offset = page_request(request)
        found = await asyncio.to_thread(self._deployments.catalogue.trained)
        rows = [_record(each) | self._serving(each.name) for each in found[offset : offset + limit]]
        return page_reply("models", rows, len(found), limit, offset, more=self._counts())

    async def shown(self, request: Request) -> Response:
        """One of them; while it is served, also where and with which token."""
        found = await asyncio.to_thread(self._deployments.catalogue.find, request.path_params["name"])
        record = _base_record(found) if isinstance(found, PretrainedModel) else _record(found)
        deployment = self._deployments.get(found.name)
        return reply(record | self._serving(found.name) | {"hf_upload_status": None, "hf_url": None} | _access(deployment))

    async def deploy(self, request: Request) -> Response:
        """Serve it; `starting` where loading it takes long. The body may name an `engine`."""
        engine = string_field(await read_object(request), "engine", default="embedded")
        done = await self._deployments.deploy(request.path_params["name"], by=request.state.who.name, engine=engine)
        return reply({"id": done.name, "model_name": done.name, "status": done.status} | _access(done))

    async def undeploy(self, request: Request) -> Response:
        """Serve it no longer."""
        name = await self._deployments.undeploy(request.path_params["name"])
        return reply({"id": name, "model_name": name, "status": "inactive"})

    def _serving(self, name: str) -> dict[str, Any]:
        known = self._deployments.get(name)
        if known is None:
            return {"deployment_status": None, "deployed_at": None, "deployed_by": None}
        status = "active" if known.status == "active" else "inactive"
        told = {"deployment_message": known.message} if known.message else {}
        return {"deployment_status": status, "deployed_at": known.deployed_at, "deployed_by": known.deployed_by or None} | told

    def _counts(self) -> dict[str, Any]:
        return {"active_deployments": len(self._deployments.names()), "max_active_deployments": self._deployments.most}


def _record(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "id": checkpoint.name,
        "model_name": checkpoint.name,
        "base_model": _plain(checkpoint.run.submission.model),
        "training_run_name": checkpoint.run.name,
        "training_run_id": checkpoint.run.id,
        "checkpoint_step": checkpoint.step,
        "reward": checkpoint.reward,
        "created_at": checkpoint.created_at,
    }


def _base_record(model: PretrainedModel) -> dict[str, Any]:
    return {"id": model.name, "model_name": model.name, "base_model": model.name, "is_pulled": model.path is not None}


def _access(deployment: Deployment | None) -> dict[str, Any]:
    """How callers reach a served model: for those who have the controller's token."""
    if deployment is None or deployment.url is None:
        return {"inference_model": None}
    where = {"inference_url": deployment.url, "inference_token": deployment.token, "inference_engine": deployment.engine}
    return {"inference_model": deployment.name} | where


def _plain(model: str) -> str:
    """A model's name; of a folder, its last part."""
    return Path(model).name if model.startswith("/") else model
