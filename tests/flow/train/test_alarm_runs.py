"""Every alarm is raised by a real run that goes wrong in its way, and none by a healthy one.

Agent, gateway, grader, pool and learner are those of any run; the policy is a decoder of a few thousand weights over bytes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from async_cases import Watched

from penstock.engines.embedded.decoder import Decoder, read_decoder_shape, save_decoder
from penstock.train.monitoring import SIGNS

AGENT = Path(__file__).parent / "alarm_run" / "agent.py"
EMBEDDED = ('engine.name="embedded"', "engine.slots=16", "rollout.group_size=8", "rollout.groups_per_step=2", "train.lr=0.01")


def alarms_of(folder: Path, label: str, *overrides: str, prompt: str = "Say something.", held_out: str = "") -> list[str]:
    """Trains on tasks with this label; returns the alarms, in order."""
    run = Watched(folder, f'agent.entry="{AGENT}"', "train.steps=12", "train.checkpoint_every=100", *EMBEDDED, *overrides)
    save_decoder(undecided(folder / "model"), folder / "model")
    for name, given in (("tasks", label), ("heldout", held_out or label)):
        rows = [{"prompt": prompt, "label": given} for _ in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.train()
    return [alarm["name"] for alarm in run.events("train.alarm")]


def undecided(model: Path) -> Decoder:
    """To which all bytes are about equally likely."""
    torch.manual_seed(3)
    decoder = Decoder(read_decoder_shape(model))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return decoder


RUNS: dict[str, Any] = {
    "entropy_collapse": {"label": "chance", "overrides": ["train.lr=0.1", "sampling.max_tokens=4", "train.steps=14"]},
    "length_explosion": {
        "label": "longer",
        "prompt": "goes on",
        "overrides": ["sampling.max_tokens=1", "train.lr=0.04", "rollout.group_size=4", "train.steps=14"],
    },
    "equal_groups": {"label": "nothing", "overrides": ["train.steps=6"]},
    "held_out_flat": {
        "label": "half",
        "held_out": "nothing",
        "overrides": ["train.eval_every=3", "sampling.max_tokens=2", "train.lr=0.03"],
    },
    "one_pattern": {"label": "letters", "overrides": ["sampling.max_tokens=2", "train.lr=0.1", "train.steps=16"]},
    "logprob_gap": {"label": "half", "overrides": ["train.lr=0.1", "rollout.max_staleness=3", "train.steps=8"]},
    "importance_at_cap": {"label": "half", "overrides": ["train.lr=0.05", "rollout.max_staleness=3", "train.steps=8"]},
    "lost_rollouts": {"label": "half", "prompt": "breaks", "overrides": ["train.steps=6"]},
}


QUICK = ("equal_groups", "held_out_flat", "lost_rollouts")
"""Run by `make test`, the others by `make test-faults`."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.soak) for kind in SIGNS])
def test_a_run_that_goes_wrong_raises_its_alarm(kind: str, tmp_path: Path):
    how = dict(RUNS[kind])
    assert kind in alarms_of(tmp_path, how.pop("label"), *how.pop("overrides"), **how)


def test_a_healthy_run_raises_none(tmp_path: Path):
    assert alarms_of(tmp_path, "half", "sampling.max_tokens=4", "train.eval_every=4") == []
