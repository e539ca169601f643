"""The counters that a gateway's workers share: each sees when another one has counted, also one that died."""

import subprocess
import sys

from penstock.gateway.shared_counters import SharedCounters


def test_what_another_worker_tells_is_seen_and_what_one_tells_oneself_is_not(tmp_path):
    one, other = (SharedCounters(tmp_path / "counters", number, 2) for number in range(2))
    before = one.read("r1"), other.read("r1")
    one.increment("r1")
    assert one.read("r1") == before[0]
    assert other.read("r1") != before[1]


def test_another_rollout_is_left_as_it_was(tmp_path):
    one, other = (SharedCounters(tmp_path / "counters", number, 2) for number in range(2))
    before = other.read("r2")
    one.increment("r1")
    assert other.read("r2") == before


def test_the_successor_of_a_killed_worker_counts_on(tmp_path):
    file = tmp_path / "counters"
    dies = "import os, signal, sys; from pathlib import Path; from penstock.gateway.shared_counters import SharedCounters\n"
    dies += "SharedCounters(Path(sys.argv[1]), 1, 3).increment('r1'); os.kill(os.getpid(), signal.SIGKILL)"
    watcher = SharedCounters(file, 0, 3)
    seen = [watcher.read("r1")]
    assert subprocess.run([sys.executable, "-c", dies, str(file)], check=False).returncode == -9
    seen.append(watcher.read("r1"))
    SharedCounters(file, 1, 3).increment("r1")
    seen.append(watcher.read("r1"))
    assert len(set(seen)) == 3
