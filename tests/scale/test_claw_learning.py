"""Claw-R1's own command line on a local Ray: a black-box flow with a plain `openai` client teaches the tiny policy its tool."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import certifi
import pytest

MULTIPLY = Path(__file__).parents[2] / "examples" / "multiply"
DEADLINE_S = 900
FLOW = "actor_rollout_ref.rollout.agent"
KEYS = (
    *(f"{FLOW}.default_agent_flow=multiply", f"{FLOW}.agent_flow_config_path=flow.yaml", f"{FLOW}.num_workers=2"),
    *("custom_reward_function.path=multiply_flow.py", "data.train_files=tiny_tasks.jsonl", "data.val_files=heldout.jsonl"),
    *("data.max_response_length=30", "data.train_batch_size=4", "data.val_max_samples=128", "actor_rollout_ref.rollout.n=8"),
    *("actor_rollout_ref.rollout.val_kwargs.temperature=1.0", "actor_rollout_ref.model.path=tiny", "trainer.save_freq=10"),
    *("actor_rollout_ref.actor.optim.lr=6e-4", "algorithm.norm_adv_by_std_in_grpo=False", "trainer.total_training_steps=16"),
    *("async_training.trigger_parameter_sync_step=1", "async_training.staleness_threshold=1", "trainer.experiment_name=learns"),
)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(DEADLINE_S + 60)
def test_documented_command_trains_the_tiny_policy_on_ray(tmp_path):
    for name in ("multiply_flow.py", "flow.yaml", "tiny_tasks.jsonl"):
        shutil.copy(MULTIPLY / name, tmp_path)
    (tmp_path / "heldout.jsonl").write_text((MULTIPLY / "tiny_heldout.jsonl").read_text() * 16)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["SSL_CERT_FILE"] = str(one_certificate(tmp_path))
    command = [sys.executable, "-m", "claw_r1.async_main", *KEYS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    before, after = map(float, re.findall(r"held-out +(\S+) → (\S+)", done.stdout)[0])
    summary = json.loads((tmp_path / "runs" / "learns" / "summary.json").read_text())
    assert (summary["exact_token_rate"], set(summary["ends"])) == (1.0, {"completed"})
    assert before < 0.4 and after > before + 0.3
    workers = [event["pid"] for event in events(tmp_path / "runs" / "learns") if event["kind"] == "worker.start"]
    assert len(set(workers)) == 2


def one_certificate(folder):
    """All that is to be read by the 770 clients of the rollouts, which would each read a machine's hundreds and never use them."""
    certificates = ssl.create_default_context(cafile=certifi.where()).get_ca_certs(binary_form=True)
    file = folder / "one.pem"
    file.write_text(ssl.DER_cert_to_PEM_cert(certificates[0]))
    return file


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
