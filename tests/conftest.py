"""One thread per test process: the models of the tests are too small for more, and two processes share the machine.

Ctrl-C is heard, in processes that tests start too, although a shell ignores it for what it runs in the background.
A CPU that claims AMX and cannot run it is found out before any process of the tests imports torch; they inherit the remedy.
"""

import os
import signal
import tempfile
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from penstock.engines.cpu_features import limit_onednn

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp(prefix="penstock-tests-"))  # notes of paused servers go there
limit_onednn()
# A loaded machine is no failure. `make check` takes a third of the examples, `make test` all.
settings.register_profile("whole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("check", settings.get_profile("whole"), max_examples=30)
settings.load_profile("whole")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
