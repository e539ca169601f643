"""The components of one controller, opened and closed together. A home folder has one controller at a time."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from penstock.errors import ControllerError
from penstock.system.files import exclusive_lock
from penstock.system.sandbox import Sandbox, SandboxWish
from penstock_controller.database import ControllerDatabase
from penstock_controller.datasets import Datasets
from penstock_controller.deployments import Deployments
from penstock_controller.home import Home
from penstock_controller.isolation import choose_isolation
from penstock_controller.repositories import Repositories
from penstock_controller.runs import RunFiles, RunQueue
from penstock_controller.supervisor import Supervisor
from penstock_controller.vault import Vault, vault_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLimits:
    runs: int = 1
    """Runs at once. One by default: a run may use the whole machine."""
    queued: int = 100
    """Runs that may wait in the queue; further ones are refused."""
    snapshot_mb: int = 256
    """Limit for submitted code, packed and unpacked."""
    dataset_mb: int = 5000
    launches: int = 5
    """How many times a run whose process was lost is started before it has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """All components that request handlers use."""

    home: Home
    database: ControllerDatabase
    runs: RunQueue
    supervisor: Supervisor
    datasets: Datasets
    vault: Vault
    deployments: Deployments
    repositories: Repositories
    limits: ControllerLimits
    sandbox: Sandbox
    """For submitted code."""
    admissions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Limits how many submissions are validated at once: each takes a CPU core and a thread."""


@asynccontextmanager
async def open_controller(home: Home, limits: ControllerLimits, *, sandbox: SandboxWish = "auto") -> AsyncGenerator[Controller]:
    """Opens the controller of the folder `home` and executes queued runs. Active runs continue after exit.

    Raises ControllerError CONTROLLER_RUNNING if another process serves the folder, ConfigError if the machine lacks the sandbox.
    """
    chosen = await asyncio.to_thread(choose_isolation, sandbox)
    home = Home(home.path.absolute()).create()
    async with AsyncExitStack() as stack:
        stack.enter_context(_hold_home_lock(home))
        database = ControllerDatabase(home.database)
        stack.callback(database.close)
        _remove_incomplete_runs(home)
        runs, vault = RunQueue(database), Vault(database, vault_key(home))
        datasets = Datasets(database, home.datasets, max_mb=limits.dataset_mb)
        stack.callback(datasets.close)
        deployments = Deployments(database, home)
        stack.push_async_callback(deployments.close)
        await deployments.start()
        supervisor = Supervisor(runs, vault, home.runs, max_running=limits.runs, max_launches=limits.launches)
        controller = Controller(
            home=home,
            database=database,
            runs=runs,
            supervisor=supervisor,
            datasets=datasets,
            vault=vault,
            deployments=deployments,
            repositories=Repositories(database),
            limits=limits,
            sandbox=chosen,
        )
        supervisor.start()
        stack.push_async_callback(supervisor.close)
        yield controller


def _remove_incomplete_runs(home: Home) -> None:
    """Removes run folders without job.json: a controller was killed while it admitted these submissions."""
    for folder in home.runs.iterdir():
        if folder.is_dir() and not RunFiles(folder).job.exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _hold_home_lock(home: Home) -> Generator[None]:
    text = f"{home.path}: another controller serves this folder; use that one, or set PENSTOCK_HOME to another folder"
    with exclusive_lock(home.lock, ControllerError(text, code="CONTROLLER_RUNNING", status=409)):
        yield
