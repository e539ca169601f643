"""One thread per test process: the models of the tests are too small for more, and two processes share the machine.

Ctrl-C is heard, in processes that tests start too, although a shell ignores it for what it runs in the background.
"""

import os
import signal
from collections import Counter

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: at the end, no process is left alone with them."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
