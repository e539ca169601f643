"""Training with `method = "lora"`: the adapter alone learns, exactly, and is saved and resumed as whole weights are."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import random_adapter
from safetensors.torch import load_file
from torch import Tensor
from training_cases import SHAPE, UNTIED, compute, make_decoder, on_policy, random_tree, section
from verify_cases import make_run

from penstock.cli import app as edge
from penstock.config import LORA_MODULES, RunConfig, load_config
from penstock.engines.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_damage, is_adapter
from penstock.engines.embedded import engine
from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.lora import load_policy
from penstock.engines.embedded.paged_core import PagedCore
from penstock.errors import ConfigError, ModelError
from penstock.records import PolicyVersion
from penstock.run.inputs import read_inputs
from penstock.train.checkpoints import restore, save
from penstock.train.learner import Learner
from penstock.train.trainer import train

TINY = Path(__file__).parents[2] / "helpers/tiny_run/train.toml"


def silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


def lora(**changes: object) -> Any:
    return section(method="lora", **changes)


def make_learner(decoder: Decoder, *, targets: tuple[str, ...] = LORA_MODULES, seed: int = 0, **changes: object) -> Learner:
    dtype = decoder.embed.weight.dtype
    adapter = random_adapter(decoder.shape, targets=targets, seed=seed)
    for parameter in adapter.parameters.values():
        parameter.data = parameter.data.to(dtype)
    return Learner(decoder, lora(**changes), adapter=adapter)


def adapter_gradients(learner: Learner) -> dict[str, Tensor]:
    assert learner.adapter is not None
    return {name: value.grad.clone() for name, value in learner.adapter.parameters.items() if value.grad is not None}


@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", [LORA_MODULES, ("q_proj", "v_proj"), ("down_proj",)], ids=["all", "some", "above attention"])
def test_shared_prefixes_give_the_gradients_of_the_flat_path(shape: Any, targets: tuple[str, ...]):
    decoder, tree = make_decoder(shape), random_tree(1)
    found = list[dict[str, Tensor]]()
    for shared, limit in ((False, 10_000), (True, 60), (True, 10_000)):
        learner = make_learner(decoder, targets=targets)
        compute(learner, tree, limit=limit, shared=shared)
        found.append(adapter_gradients(learner))
    assert len(found[0]) == 2 * len(targets) * shape.layers
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-5)


def test_the_adapter_alone_has_gradients_and_a_state():
    decoder = make_decoder()
    before = {name: value.clone() for name, value in decoder.named_parameters()}
    learner = make_learner(decoder, lr=1e-2)
    for seed in range(3):
        compute(learner, random_tree(seed), limit=60, shared=True)
        assert all(value.grad is None for value in learner.decoder.parameters())
        learner.apply()
    assert all(torch.equal(value, before[name]) for name, value in decoder.named_parameters())
    assert learner.adapter is not None
    size = sum(value.numel() for value in learner.adapter.parameters.values())
    assert sum(value.numel() for name, value in learner.state().items() if not name.startswith("step.")) == 2 * size
    assert size < sum(value.numel() for value in decoder.parameters()) / 2


def test_log_probabilities_are_those_of_the_policy_with_its_adapter():
    learner = make_learner(make_decoder())
    metrics = compute(learner, on_policy(learner.decoder, random_tree(2)), limit=60, shared=True).metrics
    assert metrics.logprob_gap < 1e-5
    assert metrics.ratio == pytest.approx(1.0, abs=1e-6)


def test_kl_penalty_is_to_base_without_copy_of_its_weights():
    decoder = make_decoder()
    learner = make_learner(decoder, kl=0.5)
    fresh = Learner(decoder, lora(kl=0.5), adapter=random_adapter(SHAPE, size=0.0))
    for parameter in fresh.adapter.parameters.values() if fresh.adapter else ():
        parameter.data = parameter.data.double()
    assert compute(learner, random_tree(3), limit=60, shared=True).metrics.kl_reference > 0.1
    assert compute(fresh, random_tree(3), limit=60, shared=True).metrics.kl_reference == pytest.approx(0.0, abs=1e-9)
    start = learner._reference  # pyright: ignore[reportPrivateUsage]
    assert start is not None and all(a is b for a, b in zip(start.parameters(), decoder.parameters(), strict=True))


# Checkpoints


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return make_run(tmp_path_factory.mktemp("made")).parent / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_learner_continues_bit_for_bit(tmp_path: Path, made: Path, dtype: torch.dtype):
    learner, other = (make_learner(make_decoder().to(dtype), seed=seed, lr=1e-2, grad_clip=1.0) for seed in (0, 1))
    step(learner, 0)
    folder = save(tmp_path / "c", PolicyVersion(number=7, step=3), learner, made)
    assert is_adapter(folder) and find_damage(folder) is None
    step(learner, 1)
    step(other, 2)
    restore(tmp_path / "c", PolicyVersion(number=7, step=3), other)
    step(other, 1)
    assert learner.adapter is not None and other.adapter is not None
    for name, value in learner.adapter.parameters.items():
        assert torch.equal(value, other.adapter.parameters[name])
    states = learner.state(), other.state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def step(learner: Learner, seed: int) -> None:
    compute(learner, random_tree(seed), limit=60, shared=True)
    learner.apply()


@pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json"])
def test_a_damaged_file_of_an_adapter_is_found(tmp_path: Path, made: Path, name: str):
    folder = save(tmp_path, PolicyVersion(number=1, step=1), make_learner(make_decoder().float()), made)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    assert name in (find_damage(folder) or "")


def test_a_checkpoint_of_another_rank_is_not_restored(tmp_path: Path, made: Path):
    save(tmp_path, PolicyVersion(number=1, step=1), make_learner(make_decoder().float()), made)
    other = Learner(make_decoder().float(), lora(), adapter=random_adapter(SHAPE, rank=2))
    with pytest.raises(Exception, match="instead"):
        restore(tmp_path, PolicyVersion(number=1, step=1), other)


# Whole runs


def config(folder: Path, *settings: str) -> RunConfig:
    return load_config(
        TINY,
        [f'run.folder="{folder}"', "train.method=lora", "train.lr=3e-3", "train.checkpoint_every=1", "train.steps=2",
         "rollout.groups_per_step=2", *settings],
    )  # fmt: skip


def run(*arguments: Any) -> Any:
    chosen = config(*arguments)
    return asyncio.run(train(chosen, read_inputs(chosen, silent), listener=silent, stop=asyncio.Event()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(folder)
    return folder / "tiny"


@pytest.mark.slow
def test_a_trained_run_is_verified_token_by_token(capsys: pytest.CaptureFixture[str], trained: Path):
    assert edge.run(["verify", str(trained), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["exact_token_rate"]) == ("exact", 1.0)
    assert set(result["recomputed"]) == {"0", "1"}  # the start policy and a checkpoint
    assert result["largest_deviation"] < 1e-3
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < entry["logprob_gap"] < 1e-3 for entry in metrics)


@pytest.mark.slow
def test_run_with_engine_of_gpus_learns_in_half_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Opened as a run opens it, in bfloat16, with the paged core; nothing is captured here."""

    def make_core(decoder: Decoder, settings: Any, decode: Any = None) -> PagedCore:
        return PagedCore(decoder, slots=32, cache_tokens=20_000, decode=decode)

    monkeypatch.setattr(engine, "make_core", make_core)
    run(tmp_path, "engine.dtype=bfloat16", "train.steps=2")
    metrics = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    assert [entry["version"] for entry in metrics] == [1, 2]
    assert all(entry["ends"] == {"completed": 16} and entry["logprob_gap"] < 1.0 for entry in metrics)
    newest = load_file(tmp_path / "tiny/checkpoints/000002" / ADAPTER_WEIGHTS)
    assert all(value.dtype == torch.bfloat16 for value in newest.values())
    assert any(value.abs().max() > 0 for name, value in newest.items() if "lora_B" in name)
    assert edge.run(["verify", str(tmp_path / "tiny"), "--json"]) == 0


@pytest.mark.slow
def test_a_changed_adapter_is_a_finding(capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path):
    from safetensors.torch import save_file

    copied = Path(shutil.copytree(trained, tmp_path / "tiny"))
    file = copied / "checkpoints/000001" / ADAPTER_WEIGHTS
    tensors = load_file(file)
    save_file({name: value + 0.3 for name, value in tensors.items()}, file)
    state = json.loads((file.parent / "state.json").read_text())
    state.pop("checksum")
    state |= {
        "sha256": {},
        "files": {each.name: each.stat().st_size for each in file.parent.iterdir() if each.name != "state.json"},
    }
    (file.parent / "state.json").write_text(json.dumps(state))
    assert edge.run(["verify", str(copied), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.slow
def test_peft_loads_a_checkpoint_and_computes_the_same(trained: Path):
    peft = pytest.importorskip("peft", reason="compares with PEFT, which is installed with the dev extra")
    from transformers import AutoModelForCausalLM

    folder = trained / "checkpoints/000002"
    base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    ids = torch.arange(20).unsqueeze(0)
    from penstock.engines.embedded.decoder import causal

    ours = load_policy(folder)
    torch.testing.assert_close(ours.logits(ours(ids, ids, causal)), theirs(ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_settings_of_the_adapter_cannot_change_when_a_run_continues(trained: Path):
    for changed in ("train.rank=8", "train.alpha=8", 'train.target_modules=["q_proj"]', "train.method=full"):
        with pytest.raises(ConfigError, match="started"):
            run(trained.parent, changed)


@pytest.mark.slow
def test_an_adapter_is_no_start_policy(tmp_path: Path, trained: Path):
    checkpoint = trained / "checkpoints/000002"
    for method in ("lora", "full"):
        with pytest.raises(ConfigError, match="merge"):
            run(tmp_path, f'model.name="{checkpoint}"', f"train.method={method}")


@pytest.mark.slow
def test_verify_without_the_base_says_what_is_missing(tmp_path: Path, trained: Path):
    copied = Path(shutil.copytree(trained / "checkpoints/000002", tmp_path / "c"))
    written = json.loads((copied / ADAPTER_CONFIG).read_text())
    (copied / ADAPTER_CONFIG).write_text(json.dumps(written | {"base_model_name_or_path": "/nowhere"}))
    with pytest.raises(ModelError, match="/nowhere"):
        load_policy(copied)


def test_moving_reference_of_adapter_shares_base_and_moves_with_adapter():
    learner = make_learner(make_decoder(), kl=0.5, kl_reference="moving", reference_every=2, lr=1e-2)
    found: list[float] = []
    for _ in range(4):
        found.append(compute(learner, random_tree(3), limit=60, shared=True).metrics.kl_reference)
        learner.apply()
    assert found[0] == pytest.approx(0.0, abs=1e-9) and found[2] == pytest.approx(0.0, abs=1e-9)
    assert found[1] > 1e-6 and found[3] > 1e-6
    reference = learner._reference  # pyright: ignore[reportPrivateUsage]
    assert reference is not None and reference.embed.weight is learner.decoder.embed.weight
