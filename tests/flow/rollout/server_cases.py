"""What the rollout server's tests share: a server and a listener for its callbacks, both on real sockets."""

import asyncio
import contextlib
import json

import aiohttp
from rollout_cases import DEADLINE_S, make_agent

from penstock import AgentWorkflowConfig
from penstock.http.listen import bind
from penstock.http.server import HttpServer
from penstock_compat.rollout_server.app import create_rollout_server, serving
from penstock_compat.rollout_server.backend import LocalBackend
from penstock_compat.rollout_server.delivery import DeliveryPolicy
from penstock_compat.rollout_server.rollouts import ServerLimits

QUICK = DeliveryPolicy(attempt_s=5, first_wait_s=0.01, longest_wait_s=0.02, deadline_s=20)
PROMPT = [{"role": "user", "content": "2 times 3?"}]


class Listener:
    """Takes callbacks and keeps them in order; `answers` are statuses, or bodies, for the next ones, 200 and `{}` after that."""

    def __init__(self, answers=()):
        self.answers = list(answers)
        self.heard = asyncio.Queue()
        self.got = []
        """Every callback: its path, headers, body and the status it was answered with."""
        self.url = ""

    @contextlib.asynccontextmanager
    async def listening(self):
        sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with HttpServer(self._serve, sock, drain_s=1, reader_s=20):
            yield self

    async def next(self, count=1):
        """Wait for so many callbacks that were taken."""
        async with asyncio.timeout(DEADLINE_S):
            return [await self.heard.get() for _ in range(count)]

    def taken(self, rollout_id=None):
        """Callbacks that were taken, as (path, body)."""
        found = [(path, body) for path, _, body, status in self.got if status == 200]
        return [(path, body) for path, body in found if rollout_id is None or body["rollout_id"] == rollout_id]

    async def _serve(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        answer = self.answers.pop(0) if self.answers else {}
        status, headers = 200, []
        if isinstance(answer, tuple):
            answer, headers = answer
        if isinstance(answer, int):
            status, answer = answer, {"error": "no"}
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        names = {key.decode(): value.decode() for key, value in scope["headers"]}
        self.got.append((scope["path"], names, json.loads(body), status))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})
        if status == 200:
            self.heard.put_nowait((scope["path"], self.got[-1][2]))


class Server:
    """A rollout server on a socket, with a client."""

    def __init__(self, app, url, session):
        self.app, self.url, self._session = app, url, session

    async def ask(self, method, path, body=None, **headers):
        """The status, the body and the headers of an answer."""
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self._session.request(method, self.url + path, data=sent, headers=headers) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def post(self, body, **headers):
        return await self.ask("POST", "/rollout", body, **headers)

    async def status(self, rollout_id):
        return (await self.ask("GET", f"/rollout/{rollout_id}/status"))[1]["status"]


def backend_of(run, grade=None, *, most=None, **options):
    """A LocalBackend whose workflow and grader are these functions of their contexts."""
    agent = make_agent(run, grade)
    config = AgentWorkflowConfig(name="w", concurrency={"max_concurrent": most})
    grader = agent.grader if grade else None
    options = {"artifacts": None, "grace_s": 0.05} | options
    return LocalBackend(workflow=agent.workflow, workflow_config=config, grader=grader, **options)


@contextlib.asynccontextmanager
async def served(backend, *, journal=None, **options):
    """The server of a back end."""
    limits = options.pop("limits", None) or ServerLimits(delivery=QUICK, drain_s=0.01)
    app = create_rollout_server(backend=backend, journal=journal, limits=limits, configure_logging=False, **options)
    with bind("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session, serving(app, sock):
            yield Server(app, url, session)


def request(listener, rollout_id="r-1", **fields):
    """The body of a rollout that is not graded unless `grader_callback_url` is given."""
    return {
        "rollout_id": rollout_id,
        "initial_messages": PROMPT,
        "chat_completions_url": "http://127.0.0.1:9/v1",
        "completion_callback_url": f"{listener.url}/completed",
    } | fields


def graded(listener, rollout_id="r-1", **fields):
    """The body of a rollout that is graded."""
    return request(listener, rollout_id, grader_callback_url=f"{listener.url}/graded", label="6", **fields)


async def nothing(ctx):
    """A workflow that ends at once."""


async def said(ctx):
    """A workflow that returns a conversation without a model call."""
    return [*ctx.prompt, {"role": "assistant", "content": "6"}]
