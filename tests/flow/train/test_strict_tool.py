"""A policy learns to fill the schema of a strict tool: every call is valid from the start, and its values become right."""

import json
from pathlib import Path

import pytest

pytest.importorskip("llguidance")

from penstock.cli.app import run

CONFIG = Path(__file__).parent / "strict_run/train.toml"


@pytest.mark.slow
def test_policy_learns_to_fill_schema_of_strict_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["train", str(CONFIG), "--set", f'run.folder="{tmp_path}"', "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    steps = [json.loads(line) for line in (tmp_path / "strict/metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward"] for step in steps]
    assert summary["exact_token_rate"] == 1.0
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    # On the first step the learner has the weights that sampled: it must find the engine's own log-probabilities.
    assert abs(steps[0]["importance"] - 1.0) < 1e-3, steps[0]
    assert run(["verify", str(tmp_path / "strict"), "--json"]) == 0
    audit = json.loads(capsys.readouterr().out)
    assert audit["status"] == "exact" and audit["recomputed_tokens"] > 1000
