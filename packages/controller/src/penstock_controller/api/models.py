"""Routes for models: pretrained models, checkpoints, and their deployment."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock_controller.api.bodies import page_reply, page_request, read_object, reply, string_field
from penstock_controller.api.links import SignedLinks
from penstock_controller.checkpoints import Checkpoint, PretrainedModel
from penstock_controller.context import Controller
from penstock_controller.deployments import Deployment

BASE = "/api/cli/models"


def routes(controller: Controller, links: SignedLinks) -> list[Route]:
    """A name with a slash is one path segment (`%2F`)."""
    handlers = ModelRoutes(controller)
    return [
        Route(f"{BASE}/base", handlers.base, methods=["GET"]),
        Route(f"{BASE}/lora", handlers.trained, methods=["GET"]),
        Route(f"{BASE}/{{name}}", handlers.show, methods=["GET"]),
        Route(f"{BASE}/{{name}}/deploy", handlers.deploy, methods=["POST"]),
        Route(f"{BASE}/{{name}}/undeploy", handlers.undeploy, methods=["POST"]),
    ]


class ModelRoutes:
    def __init__(self, controller: Controller) -> None:
        self._deployments = controller.deployments

    async def base(self, request: Request) -> Response:
        """Returns a page of pretrained models."""
        limit, offset = page_request(request)
        found = await asyncio.to_thread(self._deployments.models.base)
        rows = [_base_record(model) | self._deployment_fields(model.name) for model in found[offset : offset + limit]]
        return page_reply("models", rows, len(found), limit, offset, more=self._counts())

    async def trained(self, request: Request) -> Response:
        """Returns a page of checkpoints."""
        limit, offset = page_request(request)
        found = await asyncio.to_thread(self._deployments.models.trained)
        rows = [_checkpoint_record(each) | self._deployment_fields(each.name) for each in found[offset : offset + limit]]
        return page_reply("models", rows, len(found), limit, offset, more=self._counts())

    async def show(self, request: Request) -> Response:
        """Returns one model; while it is deployed, also its URL and token."""
        found = await asyncio.to_thread(self._deployments.models.find, request.path_params["name"])
        record = _base_record(found) if isinstance(found, PretrainedModel) else _checkpoint_record(found)
        deployment = self._deployments.get(found.name)
        record |= self._deployment_fields(found.name) | {"hf_upload_status": None, "hf_url": None}
        return reply(record | _access(deployment))

    async def deploy(self, request: Request) -> Response:
        """Deploys a model; its status is `starting` if loading takes long. The body may name an `engine`."""
        engine = string_field(await read_object(request), "engine", default="embedded")
        deployment = await self._deployments.deploy(request.path_params["name"], who=request.state.who, engine=engine)
        return reply({"id": deployment.name, "model_name": deployment.name, "status": deployment.status} | _access(deployment))

    async def undeploy(self, request: Request) -> Response:
        name = await self._deployments.undeploy(request.path_params["name"], who=request.state.who)
        return reply({"id": name, "model_name": name, "status": "inactive"})

    def _deployment_fields(self, name: str) -> dict[str, Any]:
        deployment = self._deployments.get(name)
        if deployment is None:
            return {"deployment_status": None, "deployed_at": None, "deployed_by": None}
        fields = {
            "deployment_status": "active" if deployment.status == "active" else "inactive",
            "deployed_at": deployment.deployed_at,
            "deployed_by": deployment.deployed_by or None,
        }
        return fields | ({"deployment_message": deployment.message} if deployment.message else {})

    def _counts(self) -> dict[str, Any]:
        return {"active_deployments": len(self._deployments.names()), "max_active_deployments": self._deployments.max_deployments}


def _checkpoint_record(checkpoint: Checkpoint) -> dict[str, Any]:
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
    """Returns how to call a deployed model. The token is shown to everyone who has the controller's token."""
    if deployment is None or deployment.url is None:
        return {"inference_model": None}
    access = {"inference_url": deployment.url, "inference_token": deployment.token, "inference_engine": deployment.engine}
    return {"inference_model": deployment.name} | access


def _plain(model: str) -> str:
    """Returns a model's name; of a path, its last part."""
    return Path(model).name if model.startswith("/") else model
