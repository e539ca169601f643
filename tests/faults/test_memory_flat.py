"""A gateway and its pool over many rollouts: what they hold in memory does not grow with how many there were."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import many_rollouts
import pytest
from killable_process import ALLOCATOR, FULL, times

from penstock.testing import write_tokenizer


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_however_many_rollouts_come_and_go(tmp_path: Path) -> None:
    rollouts, model = times(100_000), write_tokenizer(tmp_path / "model")
    command = [sys.executable, many_rollouts.__file__, model, tmp_path / "store", str(rollouts)]
    reported = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | ALLOCATOR).stdout
    numbers, sizes, blocks = zip(
        *(json.loads(line) for line in reported.splitlines()[rollouts // many_rollouts.SIZE // 2 :]), strict=True
    )
    per_rollout, kept = (statistics.linear_regression(numbers, values).slope for values in (sizes, blocks))
    print(f"{rollouts} rollouts: {per_rollout:.0f} bytes and {kept:.3f} objects more with each; {sizes[-1] >> 20} MiB at the end")
    assert kept < 0.5
    assert per_rollout < (100 if FULL else 600)  # the caches of SQLite fill up at first
