"""One thread per test process: the models of the tests are too small for more, and two processes share the machine.

Ctrl-C is heard, in processes that tests start too, although a shell ignores it for what it runs in the background.
AMX is off before any process of the tests imports torch: some virtual machines list it and cannot run it.
"""

import asyncio
import inspect
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from penstock.chat.renderer import Renderer
from penstock.testing import write_project, write_tokenizer

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp(prefix="penstock-tests-"))  # notes of paused servers go there
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines list AMX and cannot run it
# A loaded machine is no failure. `make check` takes a third of the examples, `make test` all.
settings.register_profile("whole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("check", settings.get_profile("whole"), max_examples=30)
settings.load_profile("whole")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder as the working folder, with the engine `cli_engine:open_engine` importable.

    `pytest.mark.project(agent=…, tasks=…, config=…, name=…)` sets what `penstock.testing.write_project` writes.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "helpers" / "cli_engine"))
    mark = request.node.get_closest_marker("project")
    return write_project(tmp_path, **(mark.kwargs if mark else {}))


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The renderer of a byte-level tokenizer with the ChatML template."""
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: at the end, no process is left alone with them. Soak tests wait for `make test-faults`."""
    if os.environ.get("PENSTOCK_FAULTS") != "full":
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="a soak test: make test-faults"))
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: "WorkerController", error: object | None) -> None:
    """End the run when a worker has died: xdist would let the others finish their files first, or wait for ever for the dead one's.

    The hang: https://github.com/pytest-dev/pytest-xdist/issues/1323
    """
    if error is None:
        return
    scheduler = node.config.pluginmanager.getplugin("dsession").sched
    running = scheduler.remove_node(node) if node in scheduler.nodes else None
    pytest.exit(f"worker {node.gateway.id} died ({error}) in {running or 'no test'}", returncode=pytest.ExitCode.TESTS_FAILED)
