"""Deployments: models that the controller serves, each in its own process, which ends with the controller.

Deployments are rows of the database. A controller that starts serves all of them again, on the same ports if these are free.
A process that ends or does not answer is restarted."""

import asyncio
import hmac
import shutil
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from penstock.codec import to_json
from penstock.errors import ControllerError
from penstock.system.processes import end_process, kill_process, read_answer, start_child
from penstock_controller.checkpoints import Checkpoint, ModelCatalogue, PretrainedModel
from penstock_controller.database import ControllerDatabase
from penstock_controller.home import Home
from penstock_controller.identity import OWNER, THE_OWNER, Identity, require_own
from penstock_controller.model_server import DeploymentEngine, ModelServerSpec
from penstock_controller.runs import RunQueue, now

FIRST_WAIT_S, LONGEST_WAIT_S, STABLE_S = 0.2, 30.0, 60.0
"""Pause before a restart: doubled, up to a limit, unless the process lived longer than STABLE_S."""
HEALTH_INTERVAL_S, MAX_MISSED = 10.0, 3
"""Pause between health checks, and how many may fail in a row before a restart."""
START_TIMEOUT_S = 600.0
"""For loading the model."""
GRACE_S = 8.0
"""Between SIGTERM and SIGKILL."""


class DeploymentProcess:
    """Keeps a model server running until `run` is cancelled. `save_port` gets the port each time the server is ready."""

    def __init__(
        self, spec: ModelServerSpec, log: Path, save_port: Callable[[int], None], *, health_s: float = HEALTH_INTERVAL_S
    ) -> None:
        self._spec, self._log, self._save_port, self._health_s = spec, log, save_port, health_s
        self.settled = asyncio.Event()
        """Set once the server is ready, or could not be started the first time."""
        self.url: str | None = None
        """Ends in `/v1`; None while no server is ready."""
        self.pid: int | None = None
        self.failure: str | None = None
        """Why no server is ready."""

    async def run(self, *, retry_start: bool) -> None:
        """Restarts the server for ever. Without `retry_start`, returns if the first start fails."""
        loop, wait_s = asyncio.get_running_loop(), FIRST_WAIT_S
        while True:
            began = loop.time()
            try:
                await self._serve()
            except (ControllerError, OSError, TimeoutError, ValueError) as cause:
                self.failure = str(cause) or "it did not start in time"
                if not (retry_start or self.settled.is_set()):
                    self.settled.set()
                    return
            wait_s = FIRST_WAIT_S if loop.time() - began > STABLE_S else min(wait_s * 2, LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _serve(self) -> None:
        """Runs one server process from its start to its end."""
        process = await self._start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.url = await self._read_url(process)
            self.pid, self.failure = process.pid, None
            self._spec = replace(self._spec, port=urlsplit(self.url).port or 0)
            self._save_port(self._spec.port)
            self.settled.set()
            await self._watch_health(process)
        finally:
            self.url = self.pid = None
            await end_process(process, GRACE_S)

    async def _start(self) -> Process:
        with self._log.open("ab") as log:
            return await start_child("penstock_controller.model_server", to_json(self._spec), stderr=log)

    async def _read_url(self, process: Process) -> str:
        status = await read_answer(process, f"its process ended as it started; {self._log} says why")
        if "error" in status:
            raise ControllerError(status["error"], code="DEPLOYMENT_FAILED", status=409)
        return status["url"]

    async def _watch_health(self, process: Process) -> None:
        """Returns when the process has ended or no longer answers."""
        ended, missed = asyncio.ensure_future(process.wait()), 0
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._health_s)) as session:
                while missed < MAX_MISSED:
                    done, _ = await asyncio.wait({ended}, timeout=self._health_s)
                    if done:
                        self.failure = f"its process ended with {process.returncode}; it is started again"
                        return
                    missed = 0 if await self._is_healthy(session) else missed + 1
            self.failure = f"its process gave no answer {MAX_MISSED} times; it is started again"
            kill_process(process)
        finally:
            ended.cancel()

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{(self.url or '').removesuffix('/v1')}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


TABLE = """CREATE TABLE IF NOT EXISTS deployments (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, folder TEXT NOT NULL, port INTEGER NOT NULL DEFAULT 0,
    engine TEXT NOT NULL, deployed_at TEXT NOT NULL, deployed_by TEXT NOT NULL)"""
MAX_DEPLOYMENTS = 2
"""Deployments at once; each holds its weights in memory."""
READY_TIMEOUT_S = 20.0
"""How long `deploy` waits for the model, since clients wait 30 s; then the deployment continues as `starting`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A deployed model and its state."""

    name: str
    """The model's name, also in API requests."""
    status: str
    """`active` while it answers, else `starting`."""
    deployed_at: str
    deployed_by: str
    person: str
    """Who may undeploy it, besides the owner."""
    engine: str
    url: str | None
    """Ends in `/v1`; None unless `active`."""
    token: str
    """The API key for callers."""
    message: str = ""
    """Why it is not `active`."""
    pid: int | None = None


class Deployments:
    """All deployments. `start` starts those in the database; `close` ends the processes and keeps the rows."""

    def __init__(
        self,
        database: ControllerDatabase,
        home: Home,
        *,
        max_deployments: int = MAX_DEPLOYMENTS,
        ready_timeout_s: float = READY_TIMEOUT_S,
        health_s: float = HEALTH_INTERVAL_S,
    ) -> None:
        self._database, self._home, self._health_s = database, home, health_s
        self.max_deployments, self._ready_timeout_s = max_deployments, ready_timeout_s
        self._key = home.key("deployments.key")
        self._processes: dict[str, DeploymentProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()
        self.models = ModelCatalogue(RunQueue(database), home)
        database.create(TABLE)
        database.add_column("deployments", f"person TEXT NOT NULL DEFAULT '{OWNER}'")

    async def start(self) -> None:
        for row in self._database.rows("SELECT * FROM deployments ORDER BY seq"):
            self._start_process(row["name"], retry_start=True)

    async def close(self) -> None:
        """Ends all processes; the rows stay."""
        for name in list(self._tasks):
            await self._end_process(name)

    def resolve(self, name: str) -> str | None:
        return self.models.resolve(name)

    def get(self, name: str) -> Deployment | None:
        row = self._database.row("SELECT * FROM deployments WHERE name = ?", [name])
        if row is None:
            return None
        process = self._processes.get(name)
        url = process.url if process else None
        return Deployment(
            name=name,
            status="active" if url else "starting",
            deployed_at=row["deployed_at"],
            deployed_by=row["deployed_by"],
            person=row["person"],
            engine=row["engine"],
            url=url,
            token=self._token(name),
            message=(process.failure if process else None) or "",
            pid=process.pid if process else None,
        )

    def names(self) -> list[str]:
        """Returns the names of deployed models, oldest first."""
        return [row["name"] for row in self._database.rows("SELECT name FROM deployments ORDER BY seq")]

    async def deploy(self, name: str, *, who: Identity = THE_OWNER, engine: str = "embedded") -> Deployment:
        """Deploys a model and waits a while until it answers. Idempotent; a deployed model keeps its engine.

        `engine` is `embedded`, or `vllm` if that is installed. ControllerError 404 for an unknown model; 409 if the model is not
        pulled, cannot be served, or there are too many deployments.
        """
        found = await asyncio.to_thread(self.models.find, name)
        folder = _folder(found)
        _check_engine(engine)
        async with self._lock:
            if found.name not in self._processes:
                self._insert(found.name, folder, engine, who)
                self._start_process(found.name, retry_start=False)
            process = self._processes[found.name]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ready_timeout_s):
                    await process.settled.wait()
            if process.failure is not None and self._tasks[found.name].done():
                await self._remove(found.name)
                raise ControllerError(f"{found.name} cannot be served: {process.failure}", code="DEPLOYMENT_FAILED", status=409)
        deployment = self.get(found.name)
        assert deployment is not None, "its row was made"
        return deployment

    async def undeploy(self, name: str, *, who: Identity = THE_OWNER) -> str:
        """Removes a deployment and returns the model's full name; ControllerError 403 if it is another's. Idempotent."""
        known = self.names()
        canonical = name if name in known else (await asyncio.to_thread(self.models.find, name)).name
        async with self._lock:
            if (deployment := self.get(canonical)) is not None:
                require_own(who, deployment.person, f"the deployment of {canonical}")
            await self._remove(canonical)
        return canonical

    def _insert(self, name: str, folder: Path, engine: str, who: Identity) -> None:
        deployed = self.names()
        if name in deployed:
            return
        if len(deployed) >= self.max_deployments:
            text = f"{len(deployed)} models are deployed, which is the most here: {', '.join(deployed)}"
            raise ControllerError(f"{text}; first run: penstock model undeploy {deployed[0]}", code="DEPLOYMENTS_FULL", status=409)
        statement = "INSERT INTO deployments (name, folder, engine, deployed_at, deployed_by, person) VALUES (?, ?, ?, ?, ?, ?)"
        self._database.write(statement, [name, str(folder), engine, now(), who.label, who.person])

    def _start_process(self, name: str, *, retry_start: bool) -> None:
        row = self._database.row("SELECT * FROM deployments WHERE name = ?", [name])
        assert row is not None, "its process follows from it"
        engine: DeploymentEngine = "vllm" if row["engine"] == "vllm" else "embedded"
        spec = ModelServerSpec(name=name, folder=row["folder"], token=self._token(name), port=row["port"], engine=engine)

        def save_port(port: int) -> None:
            self._database.write("UPDATE deployments SET port = ? WHERE name = ?", [port, name])

        log = self._home.path / "deployments.log"
        process = self._processes[name] = DeploymentProcess(spec, log, save_port, health_s=self._health_s)
        self._tasks[name] = asyncio.get_running_loop().create_task(process.run(retry_start=retry_start))

    async def _remove(self, name: str) -> None:
        self._database.write("DELETE FROM deployments WHERE name = ?", [name])
        await self._end_process(name)

    async def _end_process(self, name: str) -> None:
        self._processes.pop(name, None)
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            await asyncio.wait({task})

    def _token(self, name: str) -> str:
        return "dk-" + hmac.new(self._key, f"deployment {name}".encode(), sha256).hexdigest()[:40]


def _folder(model: Checkpoint | PretrainedModel) -> Path:
    if model.path is None:
        text = f"{model.name} is not on the controller's machine; there run: penstock model pull {model.name}"
        raise ControllerError(text, code="MODEL_NOT_PULLED", status=409)
    return model.path


def _check_engine(engine: str) -> None:
    if engine not in ("embedded", "vllm"):
        text = f"engine {engine[:40]!r} cannot serve a model here; choose embedded or vllm"
        raise ControllerError(text, code="ENGINE_UNKNOWN", status=400, details={"field": "engine"})
    if engine == "vllm" and shutil.which("vllm") is None:
        text = "there is no `vllm` on the controller's PATH; pip install vllm there, or deploy with engine embedded"
        raise ControllerError(text, code="ENGINE_MISSING", status=409, details={"field": "engine"})
