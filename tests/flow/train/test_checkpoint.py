"""Checkpoints: whole or absent whatever is killed when, and bit for bit what was saved."""

import errno
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from training_cases import SHAPE, compute, make_decoder, random_tree, section

from penstock.engines.checkpoint_files import OPTIMIZER, refuse_damaged_weights
from penstock.engines.embedded.decoder import load_decoder
from penstock.errors import ModelError, TrainError
from penstock.records import PolicyVersion
from penstock.train.algorithm import load_advantage
from penstock.train.checkpoints import (
    checkpoint_interval,
    disk_problem,
    find_intact,
    has_checksums,
    latest,
    restore,
    save,
    set_aside,
    sync,
)
from penstock.train.learner import Learner


class Killed(BaseException):
    """Stands in for kill -9: nothing may catch it."""


def fail_at(call: int, error: BaseException) -> Callable[[Path], None]:
    """An `on_disk` that fails in place of the given call, counted from 0."""
    calls = iter(range(1000))

    def on_disk(path: Path) -> None:
        if next(calls) == call:
            raise error
        sync(path)

    return on_disk


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": SHAPE.vocab_size,
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.inner,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "max_position_embeddings": SHAPE.context_length,
        "rms_norm_eps": SHAPE.norm_eps,
        "rope_theta": SHAPE.rope_theta,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def make_learner(seed: int = 0, dtype: torch.dtype = torch.float32) -> Learner:
    return Learner(make_decoder(seed=seed).to(dtype), section(lr=1e-3, grad_clip=1.0))


def step(learner: Learner, seed: int) -> None:
    compute(learner, random_tree(seed), limit=60, shared=True)
    learner.apply()


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.decoder.state_dict().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def without_checksums(folder: Path) -> None:
    """Make it a checkpoint of an older penstock."""
    state = json.loads((folder / "state.json").read_text())
    for name in ("sha256", "run", "checksum"):
        del state[name]
    del state["version"]["past"]
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_learner_continues_bit_for_bit(tmp_path: Path, model: Path, dtype: torch.dtype):
    learner, other = make_learner(0, dtype), make_learner(1, dtype)
    step(learner, 0)
    version = PolicyVersion(number=7, step=3, leases=("a", "b"))
    save(tmp_path / "c", version, learner, model)
    drawn = torch.rand(3).tolist(), random.random(), random.gauss(0, 1)
    step(learner, 1)
    step(other, 2)
    assert latest(tmp_path / "c") == version
    restore(tmp_path / "c", version, other)
    assert (torch.rand(3).tolist(), random.random(), random.gauss(0, 1)) == drawn
    step(other, 1)
    assert_equal(weights(other), weights(learner))
    assert_equal(other.state(), learner.state())


OTHER_STATES = {
    "muon": {"optimizer": "muon", "schedule": "cosine", "warmup_updates": 1},
    "sgd": {"optimizer": "sgd", "optimizer_settings": {"momentum": 0.9}, "schedule": "linear"},
    "adafactor": {"optimizer": "adafactor"},
    "rmsprop": {"optimizer": "rmsprop", "weight_decay": 0.1},
    "moving reference": {"kl": 0.3, "kl_reference": "moving", "reference_every": 2},
    "value head": {"advantage": "gae"},
}


def step_with_values(learner: Learner, seed: int) -> None:
    tree, targets = random_tree(seed), None
    if learner.section.advantage == "gae":
        rewards = [[0.0] * (sum(s.trained) - 1) + [float(seed)] for s in tree]
        tree, targets = learner.credit_tokens(tree, rewards, load_advantage(learner.section))
    update = compute(learner, tree, limit=60, shared=True)
    learner.apply(update._replace(value_targets=targets))


@pytest.mark.parametrize("name", OTHER_STATES)
def test_every_optimizer_reference_and_head_continues_bit_for_bit(tmp_path: Path, model: Path, name: str):
    settings = section(lr=1e-3, grad_clip=1.0, steps=6, **OTHER_STATES[name])
    learner = Learner(make_decoder().to(torch.float32), settings)
    for seed in range(3):
        step_with_values(learner, seed)
    version = PolicyVersion(number=3, step=3)
    save(tmp_path / "checkpoints", version, learner, model)
    resumed = Learner(make_decoder(seed=1 if name != "moving reference" else 0).to(torch.float32), settings)
    restore(tmp_path / "checkpoints", version, resumed)
    assert resumed.updates == 3 and resumed.lr == learner.lr
    for each in (learner, resumed):
        step_with_values(each, 3)
        step_with_values(each, 4)
    assert_equal(weights(learner), weights(resumed))
    assert_equal(learner.state(), resumed.state())


def test_checkpoint_whose_optimizer_has_its_former_name_can_be_restored(tmp_path: Path, model: Path):
    learner, other = make_learner(0), make_learner(1)
    step(learner, 0)
    folder = save(tmp_path, PolicyVersion(number=1, step=1), learner, model)
    (folder / "optimizer.state").rename(folder / "optimizer.safetensors")
    without_checksums(folder)
    state = (folder / "state.json").read_text()
    (folder / "state.json").write_text(state.replace("optimizer.state", "optimizer.safetensors"))
    assert latest(tmp_path) == PolicyVersion(number=1, step=1)
    restore(tmp_path, PolicyVersion(number=1, step=1), other)
    assert_equal(other.state(), learner.state())


def test_a_version_before_any_update_can_be_saved_and_restored(tmp_path: Path, model: Path):
    learner, other = make_learner(0), make_learner(1)
    step(other, 0)
    save(tmp_path, PolicyVersion(number=0, step=0), learner, model)
    restore(tmp_path, PolicyVersion(number=0, step=0), other)
    assert_equal(weights(other), weights(learner))
    assert other.state() == {}


def test_a_checkpoint_is_a_model_folder(tmp_path: Path, model: Path):
    learner = make_learner()
    folder = save(tmp_path / "c", PolicyVersion(number=1, step=1), learner, model)
    assert folder.name == "000001"
    assert_equal(load_decoder(folder).state_dict(), weights(learner))
    assert (folder / "tokenizer.json").exists() and not (folder / "model.safetensors.index.json").exists()
    again = save(tmp_path / "d", PolicyVersion(number=2, step=2), learner, folder)
    assert latest(tmp_path / "d") == PolicyVersion(number=2, step=2) and (again / "config.json").exists()
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]  # vLLM takes each for weights


def writes(checkpoints: Path, model: Path) -> int:
    """How often a save reports something as written."""
    seen: list[Path] = []
    save(checkpoints, PolicyVersion(number=1, step=1), make_learner(), model, on_disk=seen.append)
    return len(seen)


def test_killed_at_any_write_the_version_before_remains(tmp_path: Path, model: Path):
    learner = make_learner()
    calls = writes(tmp_path / "count", model)
    assert calls >= 6
    for call in range(calls):
        checkpoints = tmp_path / str(call)
        before = PolicyVersion(number=1, step=1)
        save(checkpoints, before, learner, model)
        saved = weights(learner)
        step(learner, call)
        after = PolicyVersion(number=2, step=2)
        with pytest.raises(Killed):
            save(checkpoints, after, learner, model, on_disk=fail_at(call, Killed()))
        assert latest(checkpoints) == (after if call == calls - 1 else before)  # the last call follows the rename
        other = make_learner(1)
        restore(checkpoints, before, other)
        assert_equal(weights(other), saved)
        save(checkpoints, after, learner, model)
        assert sorted(path.name for path in checkpoints.iterdir()) == ["000001", "000002"]


def test_full_disk_is_one_clear_line_and_leaves_no_litter(tmp_path: Path, model: Path):
    learner = make_learner()
    for call in range(writes(tmp_path / "count", model) - 1):
        checkpoints = tmp_path / str(call)
        save(checkpoints, PolicyVersion(number=1, step=1), learner, model)
        full = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(TrainError, match="000002") as refused:
            save(checkpoints, PolicyVersion(number=2, step=2), learner, model, on_disk=fail_at(call, full))
        assert "\n" not in str(refused.value)
        assert [path.name for path in checkpoints.iterdir()] == ["000001"]
        assert latest(checkpoints) == PolicyVersion(number=1, step=1)


@pytest.mark.parametrize("damage", ["state.json", "model.safetensors", "optimizer.state", "config.json"])
@pytest.mark.parametrize("how", ["missing", "short"])
def test_a_damaged_version_is_passed_over(tmp_path: Path, model: Path, damage: str, how: str):
    learner = make_learner()
    for number in (1, 2):
        folder = save(tmp_path / "c", PolicyVersion(number=number, step=number), learner, model)
    file = folder / damage
    file.unlink() if how == "missing" else file.write_bytes(file.read_bytes()[:-1])
    assert latest(tmp_path / "c") == PolicyVersion(number=1, step=1)
    save(tmp_path / "c", PolicyVersion(number=2, step=2), learner, model)
    assert latest(tmp_path / "c") == PolicyVersion(number=2, step=2)


def test_weights_damaged_in_place_are_refused_by_name(tmp_path: Path, model: Path):
    learner = make_learner()
    version = PolicyVersion(number=1, step=1)
    file = save(tmp_path, version, learner, model) / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(TrainError, match="000001"):
        restore(tmp_path, version, learner)


def test_the_newest_versions_are_kept_and_foreign_files_left_alone(tmp_path: Path, model: Path):
    checkpoints, learner = tmp_path / "c", make_learner()
    assert latest(checkpoints) is None
    checkpoints.mkdir()
    (checkpoints / "notes.txt").write_text("mine")
    for number in (8, 9, 10, 11):
        save(checkpoints, PolicyVersion(number=number, step=number), learner, model, kept=3)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000009", "000010", "000011", "notes.txt"]


def test_a_step_without_an_update_renews_the_state_only(tmp_path: Path, model: Path):
    learner = make_learner()
    first, second = PolicyVersion(number=4, step=4, leases=("a",)), PolicyVersion(number=4, step=5, leases=("b",))
    folder = save(tmp_path, first, learner, model)
    inode = (folder / "model.safetensors").stat().st_ino
    for call in (0, 1):
        with pytest.raises(Killed):
            save(tmp_path, second, learner, model, on_disk=fail_at(call, Killed()))
        assert latest(tmp_path) == (first, second)[call]
    save(tmp_path, second, learner, model)
    assert latest(tmp_path) == second and (folder / "model.safetensors").stat().st_ino == inode


def flip(file: Path, at: int = -5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


FILES = ["state.json", "model.safetensors", "optimizer.state", "config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
def test_changed_bit_is_detected_and_the_previous_version_intact(tmp_path: Path, model: Path, name: str):
    learner = make_learner()
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    folders = [save(tmp_path, PolicyVersion(number=n, step=n), learner, model, run="a") for n in (1, 2)]
    assert find_intact(tmp_path, "a") == (PolicyVersion(number=2, step=2), {})
    flip(folders[1] / name)
    version, damaged = find_intact(tmp_path, "a")
    assert version == PolicyVersion(number=1, step=1)
    assert list(damaged) == [folders[1]] and name in damaged[folders[1]]
    assert set_aside(folders[1]).name == "000002.damaged" and latest(tmp_path) == version


def test_every_bit_of_the_state_counts(tmp_path: Path, model: Path):
    file = save(tmp_path, PolicyVersion(number=1, step=1), make_learner(), model, run="a") / "state.json"
    whole = file.read_bytes()
    for at in random.Random(1).sample(range(len(whole)), 200):
        flip(file, at)
        assert find_intact(tmp_path, "a").version is None, at
        file.write_bytes(whole)
    assert find_intact(tmp_path, "a").version is not None


def test_a_checkpoint_of_another_run_is_not_resumed_from(tmp_path: Path, model: Path):
    folder = save(tmp_path, PolicyVersion(number=1, step=1), make_learner(), model, run="a")
    assert find_intact(tmp_path, "b") == (None, {folder: "it belongs to another run"})


def test_a_checkpoint_without_checksums_is_compared_by_its_sizes(tmp_path: Path, model: Path):
    folder = save(tmp_path, PolicyVersion(number=1, step=1), make_learner(), model)
    without_checksums(folder)
    assert not has_checksums(folder)
    assert find_intact(tmp_path, "") == (PolicyVersion(number=1, step=1), {})
    (folder / "optimizer.state").unlink()
    assert find_intact(tmp_path, "").damaged == {folder: "optimizer.state is missing"}


def test_an_engine_does_not_start_with_damaged_weights(tmp_path: Path, model: Path):
    folder = save(tmp_path, PolicyVersion(number=1, step=1), make_learner(), model)
    flip(folder / "optimizer.state")  # no engine reads it
    refuse_damaged_weights(folder)
    flip(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        refuse_damaged_weights(folder)
    (model / "state.json").write_text('{"of": "another program"}')
    refuse_damaged_weights(model)


def test_large_checkpoints_are_saved_less_often(tmp_path: Path, model: Path, monkeypatch):
    learner = make_learner()
    step(learner, 1)
    folder = save(tmp_path / "checkpoints", PolicyVersion(number=1, step=1), learner, model)
    tensors = sum((folder / name).stat().st_size for name in ("model.safetensors", OPTIMIZER))
    assert learner.checkpoint_bytes == pytest.approx(tensors, rel=0.1)
    assert checkpoint_interval(section(), {"": learner}) == 1
    monkeypatch.setattr(Learner, "checkpoint_bytes", 1_600_000_000)
    assert checkpoint_interval(section(), {"": learner}) == 9
    assert checkpoint_interval(section(checkpoint_every=4), {"": learner}) == 4
    monkeypatch.setattr(Learner, "checkpoint_bytes", 10**12)
    assert checkpoint_interval(section(), {"": learner}) == 10


def test_disk_that_is_small_for_checkpoints_is_reported_before_training(tmp_path: Path, model: Path, monkeypatch):
    learner = make_learner()
    assert disk_problem(tmp_path / "checkpoints", section(), {"": learner}) == ""
    monkeypatch.setattr(Learner, "checkpoint_bytes", 1_600_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4_000_000_000))
    text = disk_problem(tmp_path / "checkpoints", section(), {"": learner})
    assert "has 4.0 GB free, and checkpoints take 4.8 GB more (3 of 1.6 GB while one is written)" in text
