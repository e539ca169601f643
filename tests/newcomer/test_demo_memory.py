"""The demo fits a laptop of 8 GB. With the real model, so `make test-newcomer` runs it (PENSTOCK_NEWCOMER=1)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_MB = 5_000
"""As the README says."""


@pytest.mark.skipif(os.environ.get("PENSTOCK_NEWCOMER") != "1", reason="takes the real model, and minutes: make test-newcomer")
@pytest.mark.timeout(1800)
def test_three_steps_of_the_demo_take_5_gb_at_most(tmp_path):
    settings = [f"run.folder={tmp_path}", "train.steps=3", "dataset.eval_limit=8", "train.attack_grader=false"]
    command = [sys.executable, "-m", "penstock", "train", str(ROOT / "examples/multiply/train.toml"), "--json"]
    done = subprocess.run(
        [*command, *(part for setting in settings for part in ("--set", setting))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 1_000 < json.loads(done.stdout)["peak_memory_mb"] <= MOST_MB
