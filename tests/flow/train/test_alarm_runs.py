"""Whole runs with a small random policy: each goes wrong in one way and raises that alarm, and a healthy one raises none."""

import json
from pathlib import Path

import pytest
import torch
from async_cases import Watched

from penstock.engines.embedded.decoder import Decoder, read_decoder_shape
from penstock.engines.embedded.weights import save_decoder

AGENT = Path(__file__).parent / "alarm_run" / "agent.py"
FAST = ("train.lr=1e-1", "train.updates_per_step=2", "sampling.max_tokens=3")


def alarms(folder: Path, label: str, *overrides: str, held_out: str = "same") -> set[str]:
    """Those of a run on tasks with this label, which chooses how their replies are paid."""
    run = Watched(
        folder,
        'engine.name="embedded"',
        f'agent.entry="{AGENT}"',
        "rollout.group_size=8",
        "rollout.groups_per_step=2",
        "train.checkpoint_every=100",
        *overrides,
    )
    for name, count, chosen in (("tasks", 8, label), ("heldout", 2, held_out)):
        rows = [{"prompt": f"{chosen} {n}", "label": chosen} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(7)
    policy = Decoder(read_decoder_shape(folder / "model"))
    for parameter in policy.parameters():  # so small that every byte is about as likely
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    save_decoder(policy, folder / "model")
    summary = run.train()
    assert summary.status == "finished"
    assert {fields["name"] for fields in run.events("train.alarm")} == {told.split()[0] for told in summary.alarms}
    return {told.split()[0] for told in summary.alarms}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alarm", "label", "overrides"),
    [
        ("equal_groups", "same", ("train.steps=5",)),
        ("lost_rollouts", "fails", ("train.steps=5",)),
        ("importance_at_cap", "low", ("train.steps=5", "train.lr=3e-2", "train.updates_per_step=4")),
        ("logprob_gap", "low", ("train.steps=5", "train.lr=3e-2", "rollout.max_staleness=2")),
        ("held_out_flat", "low", ("train.steps=10", "train.lr=3e-2", "train.updates_per_step=2", "train.eval_every=3")),
        ("one_pattern", "low", ("train.steps=10", *FAST)),
        ("entropy_collapse", "whim", ("train.steps=11", *FAST)),
        ("length_explosion", "longer", ("train.steps=13", "train.lr=3e-2", "sampling.max_tokens=96")),
    ],
)
def test_a_run_that_goes_wrong_raises_its_alarm(tmp_path: Path, alarm: str, label: str, overrides: tuple[str, ...]):
    assert alarm in alarms(tmp_path, label, *overrides, held_out="never" if alarm == "held_out_flat" else "same")


@pytest.mark.slow
def test_a_healthy_run_raises_none(tmp_path: Path):
    assert not alarms(tmp_path, "low", "train.steps=11", "train.lr=1e-2", held_out="low")
