"""The board of a gateway's workers: each sees what the others told, whoever lives."""

import subprocess
import sys

from penstock.gateway.shared_counters import SharedCounters


def test_what_another_worker_tells_is_seen_and_what_one_tells_oneself_is_not(tmp_path):
    one, other = (SharedCounters(tmp_path / "board", number, 2) for number in range(2))
    before = one.look("r1"), other.look("r1")
    one.tell("r1")
    assert one.look("r1") == before[0]
    assert other.look("r1") != before[1]


def test_another_rollout_is_left_as_it_was(tmp_path):
    one, other = (SharedCounters(tmp_path / "board", number, 2) for number in range(2))
    before = other.look("r2")
    one.tell("r1")
    assert other.look("r2") == before


def test_the_successor_of_a_killed_worker_counts_on(tmp_path):
    file = tmp_path / "board"
    dies = "import os, signal, sys; from pathlib import Path; from penstock.gateway.shared_counters import SharedCounters\n"
    dies += "SharedCounters(Path(sys.argv[1]), 1, 3).tell('r1'); os.kill(os.getpid(), signal.SIGKILL)"
    watcher = SharedCounters(file, 0, 3)
    seen = [watcher.look("r1")]
    assert subprocess.run([sys.executable, "-c", dies, str(file)], check=False).returncode == -9
    seen.append(watcher.look("r1"))
    SharedCounters(file, 1, 3).tell("r1")
    seen.append(watcher.look("r1"))
    assert len(set(seen)) == 3
