"""Training runs killed with SIGKILL at random points: what is resumed equals what was never killed."""

import asyncio
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from penstock.engines.embedded.decoder import Decoder, read_shape
from penstock.engines.embedded.weights import save_decoder
from penstock.pool import POOLS
from penstock.testing import write_tokenizer

HERE = Path(__file__).parent / "killed_run"
TINY = Path(__file__).parents[1] / "flow" / "tiny_run"
STEPS, GROUPS, SIZE = 5, 2, 4

CONFIG = """
[run]
name = "{name}"
folder = "{folder}"
[model]
name = "{model}"
[agent]
entry = "{agent}"
[dataset]
train = "tasks.jsonl"
eval = "heldout.jsonl"
[rollout]
group_size = {size}
groups_per_step = {groups}
concurrency = 8
[sampling]
max_tokens = 16
[engine]
name = "scripted:open_engine"
[train]
steps = {steps}
lr = 1e-3
checkpoint_every = {every}
"""


def make_model(folder: Path) -> Path:
    """A random network small enough to train in milliseconds, in an ordinary model folder."""
    write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(7)
    save_decoder(Decoder(read_shape(folder)), folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    make_model(folder / "model")
    rows = [{"prompt": f"Number {n}", "label": str(n)} for n in range(20)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    return folder


def start(home: Path, name: str, *, every: int = 1) -> "subprocess.Popen[bytes]":
    config = home / f"{name}.toml"
    if not config.exists():
        config.write_text(
            CONFIG.format(
                name=name,
                folder=home / "runs",
                model=home / "model",
                agent=HERE / "agent.py",
                size=SIZE,
                groups=GROUPS,
                steps=STEPS,
                every=every,
            )
        )
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "train", str(config), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def finish(home: Path, name: str, *, every: int = 1) -> dict[str, object]:
    process = start(home, name, every=every)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()[-2000:]
    return json.loads(out)


def kill_after(home: Path, name: str, lines: int, *, every: int = 1) -> bool:
    """Start or resume the run and kill it once it has told `lines` more events; False where it ended before that."""
    log = home / "runs" / name / "events.jsonl"
    goal = lines + (log.read_bytes().count(b"\n") if log.exists() else 0)
    process = start(home, name, every=every)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_bytes().count(b"\n") >= goal:
            process.kill()
            process.communicate(timeout=30)
            return True
        time.sleep(0.002)
    process.communicate(timeout=30)
    return False


def weights(home: Path, name: str) -> str:
    newest = max((home / "runs" / name / "checkpoints").glob("[0-9]*"))
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def ledger(home: Path, name: str) -> list[str]:
    async def read() -> list[str]:
        pool = POOLS.load("sqlite")(home / "runs" / name)
        try:
            return [group_id for group_id, _ in await pool.trained()]
        finally:
            await pool.close()

    return asyncio.run(read())


@pytest.fixture(scope="module")
def unkilled(home: Path) -> str:
    summary = finish(home, "unkilled")
    assert summary["exact_token_rate"] == 1.0
    return weights(home, "unkilled")


@pytest.mark.slow
def test_run_killed_at_three_random_points_ends_with_the_same_weights(home: Path, unkilled: str) -> None:
    points = [random.randrange(1, 90) for _ in range(3)]
    killed = [kill_after(home, "killed", lines) for lines in points]
    finish(home, "killed")
    trained = ledger(home, "killed")
    assert weights(home, "killed") == unkilled, f"killed {killed} after {points} events"
    assert len(trained) == len(set(trained)) == STEPS * GROUPS, f"killed {killed} after {points} events"


@pytest.mark.slow
def test_kill_between_checkpoints_trains_no_group_twice(home: Path) -> None:
    points = [random.randrange(30, 90) for _ in range(2)]
    killed = [kill_after(home, "sparse", lines, every=3) for lines in points]
    summary = finish(home, "sparse", every=3)
    trained = ledger(home, "sparse")
    assert len(trained) == len(set(trained)) == STEPS * GROUPS, f"killed {killed} after {points} events"
    assert summary["steps"] == STEPS


@pytest.mark.slow
def test_killed_run_of_the_tiny_policy_still_learns_and_trains_no_rollout_twice(tmp_path: Path) -> None:
    steps, groups = 12, 4
    text = (TINY / "train.toml").read_text().replace("[agent]\n", "").replace('"tasks.jsonl"', f'"{TINY / "tasks.jsonl"}"')
    text = re.sub(r"(?m)^(steps|groups_per_step|checkpoint_every) = .*$", "", text)
    text = text.replace("[train]", f"[train]\nsteps = {steps}\ncheckpoint_every = 2").replace(
        "[rollout]", f"[rollout]\ngroups_per_step = {groups}"
    )
    text = text.replace("[run]", f'[agent]\nentry = "{TINY / "agent.py"}"\n[run]\nfolder = "{tmp_path / "runs"}"')
    (tmp_path / "tiny.toml").write_text(text)
    points = [random.randrange(50, 350) for _ in range(3)]
    killed = [kill_after(tmp_path, "tiny", lines) for lines in points]
    finish(tmp_path, "tiny")
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    rewards = [reward for line in lines for reward in json.loads(line)["rewards"]]
    first, last = sum(rewards[:64]) / 64, sum(rewards[-64:]) / 64
    trained = ledger(tmp_path, "tiny")
    print(f"killed {killed} after {points} events; mean reward {first:.2f} -> {last:.2f}")
    assert len(trained) == len(set(trained)) == steps * groups
    assert last > first + 0.15, f"mean reward {first:.2f} -> {last:.2f}, killed {killed} after {points} events"
