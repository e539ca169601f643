"""Deployments: models that are served while the controller runs, each by a process of its own that dies with the controller.

A deployment is a row; its process follows from it. So a controller that starts serves what the one before it served, at the same
address where that is free, and a process that ends or does not answer is replaced.
"""

import asyncio
import hmac
import shutil
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from penstock.controller.checkpoints import Checkpoint, ModelCatalogue, PretrainedModel
from penstock.controller.database import ControllerDatabase
from penstock.controller.deployment_process import HEALTH_INTERVAL_S, DeploymentProcess
from penstock.controller.home import Home
from penstock.controller.model_server import DeploymentEngine, ModelServerSpec
from penstock.controller.runs import RunQueue, now
from penstock.errors import ControllerError

TABLE = """CREATE TABLE IF NOT EXISTS deployments (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, folder TEXT NOT NULL, port INTEGER NOT NULL DEFAULT 0,
    engine TEXT NOT NULL, deployed_at TEXT NOT NULL, deployed_by TEXT NOT NULL)"""
MAX_DEPLOYMENTS = 2
"""Deployments at once: each holds its weights in memory."""
READY_TIMEOUT_S = 20.0
"""How long `deploy` waits until the model answers: a client waits 30 s. What takes longer goes on as `starting`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model that is to be served, and how that goes."""

    name: str
    """Of the model; callers name it so too."""
    status: str
    """`active` while it answers, else `starting`."""
    deployed_at: str
    deployed_by: str
    engine: str
    url: str | None
    """Ends in `/v1`; None while nothing answers."""
    token: str
    """What callers must show."""
    message: str = ""
    """Why it does not answer."""
    pid: int | None = None


class Deployments:
    """All of them; `start` brings up those that the database knows, `close` ends their processes and leaves the rows."""

    def __init__(
        self,
        database: ControllerDatabase,
        home: Home,
        *,
        most: int = MAX_DEPLOYMENTS,
        patience_s: float = READY_TIMEOUT_S,
        health_s: float = HEALTH_INTERVAL_S,
    ) -> None:
        self._database, self._home, self.most, self._patience_s, self._health_s = database, home, most, patience_s, health_s
        self._key = home.secret("deployments.key")
        self._served: dict[str, DeploymentProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()
        self.catalogue = ModelCatalogue(RunQueue(database), home)
        database.create(TABLE)

    async def start(self) -> None:
        """Serve what was served before."""
        for row in self._database.rows("SELECT * FROM deployments ORDER BY seq"):
            self._keep_up(row["name"], patient=True)

    async def close(self) -> None:
        """End all processes; the rows stay."""
        for name in list(self._tasks):
            await self._let_go(name)

    def resolve(self, name: str) -> str | None:
        return self.catalogue.resolve(name)

    def get(self, name: str) -> Deployment | None:
        """The deployment of a model."""
        row = self._database.row("SELECT * FROM deployments WHERE name = ?", [name])
        if row is None:
            return None
        served = self._served.get(name)
        url = served.url if served else None
        return Deployment(
            name=name,
            status="active" if url else "starting",
            deployed_at=row["deployed_at"],
            deployed_by=row["deployed_by"],
            engine=row["engine"],
            url=url,
            token=self._token(name),
            message=(served.failure if served else None) or "",
            pid=served.pid if served else None,
        )

    def names(self) -> list[str]:
        """Of the models that are deployed, oldest first."""
        return [row["name"] for row in self._database.rows("SELECT name FROM deployments ORDER BY seq")]

    async def deploy(self, name: str, *, by: str = "", engine: str = "embedded") -> Deployment:
        """Serve a model, and wait a while until it answers. Repeating it is harmless.

        `engine` is `embedded`, or `vllm` where that is installed; a model that is served already stays with its own.
        ControllerError 404 for an unknown model; 409 for one that is not here, for one too many, and for one that cannot be served.
        """
        found = await asyncio.to_thread(self.catalogue.find, name)
        folder = _folder(found)
        _check_engine(engine)
        async with self._changing:
            if found.name not in self._served:
                self._make_row(found.name, folder, engine, by)
                self._keep_up(found.name, patient=False)
            served = self._served[found.name]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s):
                    await served.settled.wait()
            if served.failure is not None and self._tasks[found.name].done():
                await self._forget(found.name)
                raise ControllerError(f"{found.name} cannot be served: {served.failure}", code="DEPLOYMENT_FAILED", status=409)
        deployment = self.get(found.name)
        assert deployment is not None, "its row was made"
        return deployment

    async def undeploy(self, name: str) -> str:
        """Serve it no longer; the model's own name. Repeating it is harmless."""
        known = self.names()
        canonical = name if name in known else (await asyncio.to_thread(self.catalogue.find, name)).name
        async with self._changing:
            await self._forget(canonical)
        return canonical

    def _make_row(self, name: str, folder: Path, engine: str, by: str) -> None:
        deployed = self.names()
        if name in deployed:
            return
        if len(deployed) >= self.most:
            text = f"{len(deployed)} models are deployed, which is the most here: {', '.join(deployed)}"
            raise ControllerError(f"{text}; first run: penstock model undeploy {deployed[0]}", code="DEPLOYMENTS_FULL", status=409)
        statement = "INSERT INTO deployments (name, folder, engine, deployed_at, deployed_by) VALUES (?, ?, ?, ?, ?)"
        self._database.write(statement, [name, str(folder), engine, now(), by])

    def _keep_up(self, name: str, *, patient: bool) -> None:
        row = self._database.row("SELECT * FROM deployments WHERE name = ?", [name])
        assert row is not None, "its process follows from it"
        engine: DeploymentEngine = "vllm" if row["engine"] == "vllm" else "embedded"
        orders = ModelServerSpec(name=name, folder=row["folder"], token=self._token(name), port=row["port"], engine=engine)

        def moved(to: int) -> None:
            self._database.write("UPDATE deployments SET port = ? WHERE name = ?", [to, name])

        log = self._home.path / "deployments.log"
        served = self._served[name] = DeploymentProcess(orders, log, moved, health_s=self._health_s)
        self._tasks[name] = asyncio.get_running_loop().create_task(served.run(patient=patient))

    async def _forget(self, name: str) -> None:
        self._database.write("DELETE FROM deployments WHERE name = ?", [name])
        await self._let_go(name)

    async def _let_go(self, name: str) -> None:
        self._served.pop(name, None)
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
