"""Weights served in bfloat16: masters keep the file's precision, versions are their rounding, and small updates are not lost."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from test_checkpoint import model as model  # a fixture
from training_cases import compute, make_decoder, random_tree, section
from verify_cases import make_run

from penstock.cli import app as edge
from penstock.config import load_config
from penstock.engines.embedded.decoder import load_decoder, read_weights, save_decoder
from penstock.errors import TrainError
from penstock.records import PolicyVersion
from penstock.run.inputs import read_inputs
from penstock.train import loop, precision, resources
from penstock.train.checkpoints import restore, save
from penstock.train.learner import Learner
from penstock.train.precision import round_to_bfloat16
from penstock.train.resources import open_learner
from penstock.train.trainer import train
from penstock.train.verify import VersionWeights

SEED = 11
TINY_RUN = Path(__file__).parents[2] / "helpers/tiny_run/train.toml"


def silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


def half_learner(lr: float = 1e-3, exact: bool = True) -> Learner:
    whole = make_decoder().float()
    values = dict(whole.state_dict()) if exact else None
    return Learner(make_decoder().bfloat16(), section(lr=lr), exact=values, seed=SEED)


def write_weights(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    save_decoder(make_decoder().float(), model)


def expected(learner: Learner) -> dict[str, torch.Tensor]:
    """What the masters are served as, rounded once more from a checkpoint's tensors."""
    found, first = dict[str, torch.Tensor](), 0
    for name, weight in learner.decoder.named_parameters():
        master = learner.state()[f"master.{name}"]
        found[name] = round_to_bfloat16(master.flatten(), seed=SEED, first=first).view_as(weight).bfloat16()
        first += weight.numel()
    return found


def assert_served(learner: Learner, wanted: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(weight, wanted[name]) for name, weight in learner.decoder.named_parameters())


def test_masters_keep_the_precision_of_the_file(model: Path):
    write_weights(model)
    exact = read_weights(model)
    learner = Learner(load_decoder(model, dtype=torch.bfloat16), section(), exact=exact, seed=SEED)
    for name, _ in learner.decoder.named_parameters():
        kept = learner.state()[f"master.{name}"]
        assert torch.equal(kept, exact[name]) and not torch.equal(kept, kept.bfloat16().float())


def test_every_version_is_the_rounding_of_the_masters():
    learner, tree = half_learner(), random_tree(1)
    learner.publish()
    assert_served(learner, expected(learner))
    for _ in range(3):
        compute(learner, tree, limit=60, shared=True)
        learner.apply()
        assert_served(learner, expected(learner))


def test_gradients_of_many_passes_are_summed_in_float32():
    learner, tree = half_learner(), random_tree(2)
    compute(learner, tree, limit=20, shared=False)
    sums = [value.grad for value in learner._masters.values()]  # pyright: ignore[reportPrivateUsage]
    assert all(grad is not None and grad.dtype == torch.float32 for grad in sums)
    assert any(not torch.equal(grad, grad.bfloat16().float()) for grad in sums if grad is not None)
    assert all(weight.grad is None for weight in learner.decoder.parameters())


def test_a_resumed_learner_serves_the_same_bits(tmp_path: Path, model: Path):
    learner, tree = half_learner(), random_tree(3)
    compute(learner, tree, limit=60, shared=True)
    learner.apply()
    version = PolicyVersion(number=1, step=1)
    save(tmp_path, version, learner, model)
    resumed = half_learner(exact=False)
    restore(tmp_path, version, resumed)
    assert_served(resumed, dict(learner.decoder.named_parameters()))
    resumed.publish()  # rounding again changes nothing
    assert_served(resumed, dict(learner.decoder.named_parameters()))
    for one in (learner, resumed):
        compute(one, tree, limit=60, shared=True)
        one.apply()
    assert_served(resumed, dict(learner.decoder.named_parameters()))
    assert resumed.served_share == learner.served_share


def test_served_share_reports_what_rounding_lost(monkeypatch: pytest.MonkeyPatch):
    def shares(exact: bool) -> list[float]:
        learner, found = half_learner(lr=1e-5, exact=exact), list[float]()
        learner.publish()
        for _ in range(4):
            compute(learner, random_tree(4), limit=1000, shared=True)
            learner.apply()
            found.append(learner.served_share)
        return found

    for exact in (True, False):
        assert sum(shares(exact)) / 4 == pytest.approx(1.0, abs=0.4)  # of 14,000 weights, a few hundred move
    monkeypatch.setattr(precision, "round_to_bfloat16", lambda values, **_: values.bfloat16().float())  # type: ignore[reportUnknownLambdaType]
    assert sum(shares(False)) / 4 < 0.25  # masters on the grid: all is lost but that of the smallest weights
    assert Learner(make_decoder().float(), section()).served_share == 1.0


class TorchDynamoException(RuntimeError):
    """As torch names the errors of its compiler."""


def test_rounding_that_cannot_be_compiled_is_computed_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def uncompilable(values: torch.Tensor, *, seed: int, first: int, compiled: bool = False) -> torch.Tensor:
        if compiled:
            raise TorchDynamoException("no C compiler was found\nin many lines")
        return round_to_bfloat16(values, seed=seed, first=first)

    monkeypatch.setattr(precision, "round_to_bfloat16", uncompilable)
    served = {"a": torch.zeros(1000, dtype=torch.bfloat16, requires_grad=True)}
    exact = torch.randn(1000)
    made = precision.MasterWeights(served, exact={"a": exact}, seed=SEED)
    for _ in range(2):
        made.publish(compiled=True)
        assert torch.equal(served["a"].float(), round_to_bfloat16(exact, seed=SEED, first=0))
    assert caplog.messages == ["rounding cannot be compiled here, so it is slower: no C compiler was found"]


def test_start_policy_in_float32_is_verified_unchanged_served(model: Path, tmp_path: Path):
    write_weights(model)
    learner = Learner(load_decoder(model, dtype=torch.bfloat16), section(), exact=read_weights(model), seed=SEED)
    learner.publish()
    read = VersionWeights(model, tmp_path, rounded_by=SEED).load(0)
    assert read is not None
    assert_served(learner, {name: weight.bfloat16() for name, weight in read.named_parameters()})
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in read.parameters())


def test_a_run_in_bfloat16_is_recomputed_by_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path, dtype="bfloat16")
    assert edge.run(["verify", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "exact" and set(result["recomputed"]) == {"0", "1"}
    assert result["mean_deviation"] < 0.05


@pytest.mark.slow
def test_run_in_bfloat16_reports_share_and_checkpoints_hold_rounded_masters(tmp_path: Path):
    settings = [f'run.folder="{tmp_path}"', "run.seed=11", "train.steps=2", "train.checkpoint_every=1", 'engine.dtype="bfloat16"']
    config = load_config(TINY_RUN, settings)
    asyncio.run(train(config, read_inputs(config, silent), listener=silent, stop=asyncio.Event()))
    folder = tmp_path / "tiny"
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(entries) == 2 and all(0.5 < entry["served_share"] < 1.5 and entry["memory_halvings"] == 0 for entry in entries)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    served, kept = load_decoder(newest), load_file(newest / "optimizer.state")
    first = 0
    for name, weight in served.named_parameters():
        master = kept[f"master.{name}"]
        assert torch.equal(round_to_bfloat16(master.flatten(), seed=11, first=first).view_as(weight), weight.detach())
        first += weight.numel()


@pytest.mark.slow
def test_a_small_share_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(loop, "SMALL_SHARE", 2.0)
    settings = [f'run.folder="{tmp_path}"', "train.steps=1", 'engine.dtype="bfloat16"']
    config = load_config(TINY_RUN, settings)
    with caplog.at_level(logging.WARNING):
        asyncio.run(train(config, read_inputs(config, silent), listener=silent, stop=asyncio.Event()))
    assert any("of the update reached the served weights" in record.getMessage() for record in caplog.records)


def test_a_gpu_without_room_for_masters_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(resources, "make_learner", full)
    config = load_config(TINY_RUN, [])
    with pytest.raises(TrainError, match=r"set engine\.cache_tokens") as refused:
        open_learner(make_decoder().float(), config, read_inputs(config, silent))
    assert "\n" not in str(refused.value)
