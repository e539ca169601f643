"""Adapters against PEFT: the same numbers, the same gradients, files that either reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import random_adapter
from engine_cases import SHAPE, make_decoder, write_policy
from safetensors.torch import load_file, save_file

from penstock.cli import app as edge
from penstock.config import LORA_MODULES
from penstock.engines.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_base, is_adapter, model_digest
from penstock.engines.embedded.decoder import Decoder, causal, load_decoder
from penstock.engines.embedded.lora import Adapter, load_policy, merge_adapter, read_adapter, share_decoder
from penstock.errors import ModelError

SOME = ("q_proj", "v_proj", "down_proj")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [11, 12, 5, 40, 41, 2, 3]])


def logits(decoder: Decoder) -> torch.Tensor:
    return decoder.logits(decoder(IDS, torch.arange(IDS.shape[1]).expand_as(IDS), causal))


def write_adapter(folder: Path, base: Path, **options: Any) -> Adapter:
    folder.mkdir()
    adapter = random_adapter(SHAPE, base=base, digest=model_digest(base), **options)
    adapter.save(folder)
    return adapter


@pytest.fixture(scope="module")
def peft() -> Any:
    """Slow to import: only the process that runs this file should."""
    return pytest.importorskip("peft", reason="compares with PEFT, which is installed with the dev extra")


def peft_model(base: Path, folder: Path, *, trainable: bool = False) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder, is_trainable=trainable)


@pytest.mark.parametrize("targets", [LORA_MODULES, SOME, ("k_proj",)], ids=["all", "some", "one"])
def test_peft_loads_what_is_saved_and_computes_the_same(tmp_path: Path, targets: tuple[str, ...], peft: Any):
    base = write_policy(tmp_path / "base", model_type="llama")
    write_adapter(tmp_path / "adapter", base, targets=targets)
    theirs = peft_model(base, tmp_path / "adapter")(IDS).logits
    ours = logits(load_policy(tmp_path / "adapter"))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    assert (ours - logits(load_policy(base))).abs().max() > 0.1


def test_gradients_equal_those_of_a_plain_peft_model(tmp_path: Path, peft: Any):
    base = write_policy(tmp_path / "base", model_type="llama")
    adapter = write_adapter(tmp_path / "adapter", base)
    theirs = peft_model(base, tmp_path / "adapter", trainable=True)
    decoder = make_decoder()
    adapter.attach(decoder)
    wanted = IDS.roll(1, 0)[..., None]
    theirs(IDS).logits.log_softmax(-1).gather(-1, wanted).sum().backward()
    logits(decoder).log_softmax(-1).gather(-1, wanted).sum().backward()
    named = {name.replace(".default.", "."): value for name, value in theirs.named_parameters() if value.requires_grad}
    assert named.keys() == adapter.parameters.keys()
    for name, parameter in adapter.parameters.items():
        torch.testing.assert_close(parameter.grad, named[name].grad, atol=1e-3, rtol=1e-3)
    assert all(weight.grad is None for weight in decoder.parameters())


def test_an_adapter_that_peft_saved_is_read(tmp_path: Path, peft: Any):
    from transformers import AutoModelForCausalLM

    base = write_policy(tmp_path / "base", model_type="llama")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(SOME), init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_policy(tmp_path / "adapter")
    torch.testing.assert_close(logits(ours), theirs(IDS).logits, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_new_adapter_adds_nothing_and_starts_as_peft_does():
    decoder = make_decoder()
    before = logits(decoder)
    adapter = Adapter(SHAPE, random_adapter(SHAPE, rank=8).config, seed=3)
    shared = share_decoder(decoder)
    adapter.attach(shared)
    torch.testing.assert_close(logits(shared), before, atol=1e-6, rtol=1e-6)
    a = torch.cat([value.flatten() for name, value in adapter.parameters.items() if "lora_A" in name and "down" not in name])
    assert a.abs().max() <= SHAPE.hidden**-0.5
    assert a.std() == pytest.approx(SHAPE.hidden**-0.5 / 3**0.5, rel=0.05)
    again = Adapter(SHAPE, adapter.config, seed=3)
    assert all(torch.equal(value, again.parameters[name]) for name, value in adapter.parameters.items())


@torch.no_grad()
def test_shared_decoder_has_same_weights_and_its_own_adapter():
    decoder = make_decoder()
    shared = share_decoder(decoder)
    random_adapter(SHAPE).attach(shared)
    assert all(a is b for a, b in zip(decoder.parameters(), shared.parameters(), strict=True))
    assert not torch.equal(logits(decoder), logits(shared))
    assert torch.equal(logits(share_decoder(shared)), logits(decoder))


def test_what_is_saved_is_read_back_bit_for_bit(tmp_path: Path):
    base = write_policy(tmp_path / "base", model_type="llama")
    adapter = write_adapter(tmp_path / "adapter", base, targets=SOME)
    read = read_adapter(tmp_path / "adapter", SHAPE)
    assert read.config == adapter.config
    assert all(torch.equal(value, adapter.parameters[name]) for name, value in read.parameters.items())
    assert is_adapter(tmp_path / "adapter") and not is_adapter(base)


def test_a_base_that_is_missing_or_another_is_refused(tmp_path: Path):
    base = write_policy(tmp_path / "base", model_type="llama")
    write_adapter(tmp_path / "adapter", base)
    assert find_base(tmp_path / "adapter") == base
    other = write_policy(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="model"):
        find_base(tmp_path / "adapter", other)
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="which"):
        load_policy(tmp_path / "adapter")
    assert find_base(tmp_path / "adapter", tmp_path / "moved") == tmp_path / "moved"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "bias is not supported"),
        ({"target_modules": ["lm_head"]}, "adds to 'lm_head'"),
        ({"r": 5}, "instead of"),
        ({"target_modules": ["q_proj"]}, "the adapter has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_adapter_that_would_be_misread_is_refused(tmp_path: Path, change: dict[str, object], problem: str):
    base = write_policy(tmp_path / "base", model_type="llama")
    write_adapter(tmp_path / "adapter", base)
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=problem):
        load_policy(tmp_path / "adapter")


def test_a_damaged_adapter_is_refused_in_one_line(tmp_path: Path):
    base = write_policy(tmp_path / "base", model_type="llama")
    write_adapter(tmp_path / "adapter", base)
    file = tmp_path / "adapter" / ADAPTER_WEIGHTS
    assert set(load_file(file)) == set(random_adapter(SHAPE).parameters)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="restore"):
        load_policy(tmp_path / "adapter")


# Merging


def test_a_merged_model_computes_the_same_without_an_adapter(tmp_path: Path, peft: Any):
    base = write_policy(tmp_path / "base", model_type="llama")
    (base / "tokenizer.json").write_text("{}")
    write_adapter(tmp_path / "adapter", base, targets=SOME)
    reported = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert reported.dtype == "float32" and reported.kept == pytest.approx(1.0, abs=1e-6) and reported.largest < 1e-6
    assert {file.name for file in (tmp_path / "merged").iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    torch.testing.assert_close(
        logits(load_decoder(tmp_path / "merged")), logits(load_policy(tmp_path / "adapter")), atol=1e-4, rtol=1e-4
    )
    theirs = peft_model(base, tmp_path / "adapter").merge_and_unload().state_dict()
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-5)


def test_merging_says_what_rounding_loses(tmp_path: Path):
    base = write_policy(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, base / "model.safetensors")
    write_adapter(tmp_path / "small", base, size=0.01)
    write_adapter(tmp_path / "large", base, size=0.5)
    small, large = (merge_adapter(tmp_path / name, tmp_path / f"{name}-merged") for name in ("small", "large"))
    assert small.dtype == large.dtype == "bfloat16"
    assert abs(1 - large.kept) < 0.01 < abs(1 - small.kept)
    assert all(value.dtype == torch.bfloat16 for value in load_file(tmp_path / "small-merged" / "model.safetensors").values())


def test_merging_takes_newest_checkpoint_of_run_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = write_policy(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base)
    assert edge.run(["model", "merge", str(tmp_path / "adapter"), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == pytest.approx(1.0, abs=1e-6)
    for arguments, problem in (
        ([str(tmp_path / "adapter"), str(tmp_path / "out")], "is there already"),
        ([str(base), str(tmp_path / "other")], "is no LoRA adapter"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "other")], "is no LoRA adapter"),
    ):
        assert edge.run(["model", "merge", *arguments]) != 0
        reported = capsys.readouterr().err.strip().splitlines()
        assert problem in reported[-1] and "Traceback" not in "".join(reported)
    base.rename(tmp_path / "moved")
    assert edge.run(["model", "merge", str(tmp_path / "adapter"), str(tmp_path / "other")]) != 0
    assert "which is not there" in capsys.readouterr().err
    merged = edge.run(["model", "merge", str(tmp_path / "adapter"), str(tmp_path / "other"), "--base", str(tmp_path / "moved")])
    assert merged == 0
