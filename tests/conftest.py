"""One thread per test process: the models of the tests are too small for more, and two processes share the machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
