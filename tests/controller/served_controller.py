"""A controller on a real socket, and an HTTP client with its token."""

import contextlib
import json

import aiohttp
from yarl import URL

from penstock_controller.api.app import serve_controller
from penstock_controller.context import ControllerLimits, open_controller
from penstock_controller.home import Home
from penstock_controller.runs import RunFiles, RunStatus, Submission, new_id

ROWS = b'{"prompt": "6 times 7?", "label": "42"}\n{"prompt": "2 times 3?", "label": "6"}\n'


class ControllerClient:
    """Calls a controller over HTTP."""

    def __init__(self, controller, url, session):
        self.controller, self.url, self._session = controller, url, session

    async def ask(self, method, path, body=None, *, token=True, **headers):
        """The status and the JSON of an answer on `/api/cli/<path>`, or of a whole URL."""
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        url = path if path.startswith("http") else f"{self.url}/api/cli/{path}"
        shown = {"authorization": f"Bearer {self.controller.home.token()}"} if token else {}
        shown |= {} if "X-Osmosis-Git" in headers else {"X-Osmosis-Git": "acme/agents"}
        asked = self._session.request(method, URL(url, encoded=True), data=sent, headers=shown | headers)
        async with asked as response:
            content = await response.read()
            is_json = response.headers.get("content-type", "").startswith("application/json")
            return response.status, json.loads(content) if is_json else content

    async def begin(self, name, content, extension="jsonl", **more):
        return await self.ask("POST", "datasets", {"file_name": name, "file_size": len(content), "extension": extension} | more)

    async def upload(self, name, content, extension="jsonl", **more):
        """Upload a dataset in all three requests; returns the answer to `complete`."""
        status, begun = await self.begin(name, content, extension, **more)
        assert status == 201, begun
        status, answer = await self.ask("PUT", begun["upload"]["presigned_url"], content, token=False)
        assert status == 204, answer
        return await self.ask("POST", f"datasets/{begun['id']}/complete", {"file_extension": extension})


@contextlib.asynccontextmanager
async def served_controller(folder, **limits):
    """Open a controller and serve it; yields a client for it."""
    async with (
        open_controller(Home(folder / "home"), ControllerLimits(**limits)) as controller,
        serve_controller(controller) as url,
        aiohttp.ClientSession() as session,
    ):
        yield ControllerClient(controller, url, session)


def submission(**fields):
    """What a run was submitted with."""
    plain = {
        "rollout": "r",
        "entrypoint": "main.py",
        "model": "tiny",
        "dataset": "d",
        "dataset_digest": "0" * 64,
        "snapshot": "0" * 64,
    }
    return Submission(**plain | {"tables": {}} | fields)


def add_training(runs, home, name, *, status=RunStatus.FINISHED):
    """A training run that is over, and its own folder."""
    run = runs.add("train", new_id(), name, submission())
    runs.finish(run.id, status)
    run = runs.get("train", run.id)
    return run, RunFiles(home.runs / run.id).results(run)
