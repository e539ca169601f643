"""The stations of one controller, opened and closed together; a folder has one controller at a time."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from penstock.controller.database import ControllerDatabase
from penstock.controller.datasets import Datasets
from penstock.controller.deployments import Deployments
from penstock.controller.encryption import vault_key
from penstock.controller.home import Home
from penstock.controller.repositories import Repositories
from penstock.controller.runs import RunFiles, RunQueue
from penstock.controller.supervisor import Supervisor
from penstock.controller.vault import Vault
from penstock.errors import ControllerError
from penstock.system.locks import exclusive_lock


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLimits:
    """What a controller takes on."""

    runs: int = 1
    """Carried out at once: each has the whole machine unless its owner says that it has room for more."""
    queued: int = 100
    """That may wait; one more is refused."""
    snapshot_mb: int = 256
    """Of code, packed or unpacked."""
    dataset_mb: int = 5000
    launches: int = 5
    """How often a process is started for a run whose process was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """Everything that a request touches."""

    home: Home
    database: ControllerDatabase
    runs: RunQueue
    supervisor: Supervisor
    datasets: Datasets
    vault: Vault
    deployments: Deployments
    repositories: Repositories
    limits: ControllerLimits
    admissions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Held while a submission is looked at, which takes a processor and a thread."""


@asynccontextmanager
async def open_controller(home: Home, limits: ControllerLimits) -> AsyncGenerator[Controller]:
    """Serve the folder `home`: from here on queued runs are carried out; those that run go on when this is left.

    ControllerError CONTROLLER_RUNNING where another process serves it.
    """
    home = Home(home.path.absolute()).make()
    async with AsyncExitStack() as stack:
        stack.enter_context(_hold_home_lock(home))
        database = ControllerDatabase(home.database)
        stack.callback(database.close)
        _remove_incomplete_runs(home)
        runs, vault = RunQueue(database), Vault(database, vault_key(home))
        datasets = Datasets(database, home.datasets, largest_mb=limits.dataset_mb)
        stack.callback(datasets.close)
        deployments = Deployments(database, home)
        stack.push_async_callback(deployments.close)
        await deployments.start()
        supervisor = Supervisor(runs, vault, home.runs, at_once=limits.runs, launches=limits.launches)
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
        )
        supervisor.start()
        stack.push_async_callback(supervisor.close)
        yield controller


def _remove_incomplete_runs(home: Home) -> None:
    """Remove what submissions left that were being taken in when a controller was killed."""
    for folder in home.runs.iterdir():
        if folder.is_dir() and not RunFiles(folder).job.exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _hold_home_lock(home: Home) -> Generator[None]:
    text = f"{home.path}: another controller serves this folder; use that one, or set PENSTOCK_HOME to another folder"
    with exclusive_lock(home.lock, ControllerError(text, code="CONTROLLER_RUNNING", status=409)):
        yield
