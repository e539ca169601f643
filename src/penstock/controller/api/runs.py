"""Evaluations and training runs: submitted, listed, looked at, stopped."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.controller.api import views
from penstock.controller.api.bodies import read_object, reply
from penstock.controller.api.logs import log_page, wanted
from penstock.controller.api.pages import page_reply, paged
from penstock.controller.api.results import Results, planned_steps, settings
from penstock.controller.api.submissions import submit
from penstock.controller.checkpoints import checkpoints_of
from penstock.controller.runs import Kind, Run
from penstock.controller.stations import Controller
from penstock.errors import ControllerError

PATHS: Mapping[Kind, str] = {"eval": "/api/cli/eval-runs", "train": "/api/cli/training-runs"}
KEYS: Mapping[Kind, str] = {"eval": "eval_runs", "train": "training_runs"}


def routes(controller: Controller, results: Results) -> list[Route]:
    """Of both kinds."""
    both = [route for kind in PATHS for route in RunRoutes(controller, results, kind).routes()]
    return [
        *both,
        Route(f"{PATHS['train']}/{{ref}}/checkpoints", RunRoutes(controller, results, "train").checkpoints, methods=["GET"]),
    ]


class RunRoutes:
    """Of one kind."""

    def __init__(self, controller: Controller, results: Results, kind: Kind) -> None:
        self._controller = controller
        self._results = results
        self._kind: Kind = kind

    def routes(self) -> list[Route]:
        """Where what is."""
        path = PATHS[self._kind]
        return [
            Route(path, self._list, methods=["GET"]),
            Route(path, self._submit, methods=["POST"]),
            Route(f"{path}/{{ref}}", self._detail, methods=["GET"]),
            Route(f"{path}/{{ref}}/stop", self._stop, methods=["POST"]),
            Route(f"{path}/{{ref}}/metrics", self._metrics, methods=["GET"]),
            Route(f"{path}/{{ref}}/logs", self._logs, methods=["GET"]),
        ]

    async def _list(self, request: Request) -> Response:
        limit, offset = paged(request)
        found, total = await asyncio.to_thread(self._controller.runs.page, self._kind, limit=limit, offset=offset)
        return page_reply(KEYS[self._kind], [await self._row(run) for run in found], total, limit, offset)

    async def _row(self, run: Run) -> dict[str, Any]:
        files = self._results.files(run)
        if self._kind == "eval":
            return views.eval_row(run, await self._results.results(run), settings(files))
        return views.training_row(run, await self._results.trained(run), planned_steps(files))

    async def _detail(self, request: Request) -> Response:
        run = await self._run(request)
        chosen = settings(self._results.files(run))
        if self._kind == "eval":
            return reply(views.eval_detail(run, await self._results.results(run), chosen))
        steps = planned_steps(self._results.files(run))
        return reply(views.training_detail(run, await self._results.trained(run), steps, chosen))

    async def _submit(self, request: Request) -> Response:
        body = await read_object(request)
        run = await submit(self._controller, self._kind, body, git=request.headers.get("x-osmosis-git"), who=request.state.who)
        return reply(views.accepted(run), 201)

    async def _stop(self, request: Request) -> Response:
        run = await self._run(request)
        if not await asyncio.to_thread(self._controller.supervisor.stop, run):
            text = f"{run.name} is over already: {run.status}"
            raise ControllerError(text, code="RUN_OVER", status=409, details={"status": run.status})
        return reply(views.accepted(await self._run(request)))

    async def _metrics(self, request: Request) -> Response:
        run = await self._run(request)
        found = self._results.evaluation_metrics(run) if self._kind == "eval" else self._results.training_metrics(run)
        return reply(await found)

    async def _logs(self, request: Request) -> Response:
        run = await self._run(request)
        asked = wanted(request, run.id)
        return reply(await asyncio.to_thread(log_page, self._results.files(run).log, run.id, asked))

    async def checkpoints(self, request: Request) -> Response:
        """Those of a training run, by step."""
        run = await self._run(request)
        found = await asyncio.to_thread(checkpoints_of, run, self._results.files(run).results(run))
        listed = [
            {
                "id": f"{run.id}-{each.step}",
                "checkpoint_name": each.name,
                "checkpoint_step": each.step,
                "status": "ready",
                "created_at": each.created_at,
                "reward": each.reward,
            }
            for each in reversed(found)
        ]
        return reply({"training_run_id": run.id, "training_run_name": run.name, "checkpoints": listed})

    async def _run(self, request: Request) -> Run:
        return await asyncio.to_thread(self._controller.runs.get, self._kind, request.path_params["ref"])
