"""One heap for all threads: what one frees, the next one uses, and the system gets it back when asked."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from penstock.system.processes import share_heap, trim_heap

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6

def work():  # blocks that are too small to be mapped each alone; the last ones stay, and with them the heap below
    blocks = [bytearray(100_000) for _ in range(2000)]
    kept.append(blocks[-1])

kept, before = [], resident_mb()
if SHARED:
    share_heap()
pool = ThreadPoolExecutor(3)
meet = threading.Barrier(3)
list(pool.map(lambda _: (meet.wait(), bytearray(100_000)), range(3)))  # each thread has its heap
turn = threading.Lock()
for _ in range(2):
    list(pool.map(lambda _: (meet.wait(), turn.acquire(), work(), turn.release()), range(3)))
peak = resident_mb() - before
trim_heap()
print(peak, resident_mb() - before)
"""


def held_and_left(shared: bool) -> tuple[int, int]:
    program = PROGRAM.replace("SHARED", str(shared))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=plain)
    assert done.returncode == 0, done.stderr
    held, left = map(int, done.stdout.split())
    return held, left


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_threads_use_what_others_freed_and_system_gets_it_back():
    held, left = held_and_left(shared=True)
    assert held > 100 and left < 50
    apart, _ = held_and_left(shared=False)
    assert apart > 2 * held
