"""The decoder against transformers' models, and its weights on disk."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engines.embedded.decoder import (
    FEW_ROWS,
    Decoder,
    DecoderShape,
    causal,
    load_decoder,
    public_state,
    read_decoder_shape,
    save_decoder,
)
from penstock.errors import ModelError

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5000.0}
SCALED["original_max_position_embeddings"] = 64
MODELS = {
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, scaled rotations, one key head": ("Llama", {"rope_parameters": SCALED, "num_key_value_heads": 1}),
    "llama, wide heads": ("Llama", {"head_dim": 32, "rms_norm_eps": 1e-3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


def write_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """Random weights as transformers saves them; returns its model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
        model.save_pretrained(folder)
    return model


def logits(decoder: Decoder, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return decoder.logits(decoder(ids, torch.arange(ids.shape[1]).expand_as(ids), causal))


@pytest.mark.slow  # transformers is imported
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path):
    theirs = write_model(tmp_path, *MODELS[name])
    ids = torch.randint(0, 97, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(load_decoder(tmp_path), ids), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama, tied", "qwen3"])
def test_saved_weights_are_the_loaded_ones_under_their_public_names(name: str, tmp_path: Path):
    theirs = write_model(tmp_path, *MODELS[name])
    decoder = load_decoder(tmp_path)
    expected = {key: value for key, value in theirs.state_dict().items() if key != "lm_head.weight" or not decoder.shape.tied}
    saved = public_state(decoder)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in expected)


def test_weights_survive_saving_and_loading(tmp_path: Path):
    write_model(tmp_path, *MODELS["qwen2"])
    decoder = load_decoder(tmp_path)
    with torch.no_grad():
        decoder.layers[1].qkv.weight.mul_(2.0)
    save_decoder(decoder, tmp_path)
    again = load_decoder(tmp_path).state_dict()
    assert all(torch.equal(again[key], value) for key, value in decoder.state_dict().items())


def test_few_rows_and_many_rows_give_the_same():
    """Few rows take another product on a CPU."""
    torch.manual_seed(0)
    shape = DecoderShape(
        vocab_size=50,
        hidden=32,
        inner=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        context_length=64,
        tied=False,
        qkv_bias=True,
    )
    decoder = Decoder(shape)
    ids = torch.randint(0, 50, (FEW_ROWS[1] + 1, 1))
    many = logits(decoder, ids)
    few = torch.cat([logits(decoder, part) for part in ids.split(7)])
    single = torch.cat([logits(decoder, part) for part in ids.split(1)])
    torch.testing.assert_close(few, many)
    torch.testing.assert_close(single, many)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "cannot run a GPT2LMHeadModel; it runs LlamaForCausalLM"),
        ({"architectures": ["Idefics3ForConditionalGeneration"], "vision_config": {}}, "sees pictures.*through vLLM.*not trained"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_a_model_that_it_cannot_be_is_refused(change: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SMALL, **change}))
    with pytest.raises(ModelError, match=message):
        read_decoder_shape(tmp_path)


def test_missing_weights_are_named(tmp_path: Path):
    write_model(tmp_path, *MODELS["llama, tied"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"model\.layers\.3"):
        load_decoder(tmp_path)


def test_weights_that_it_would_ignore_are_refused(tmp_path: Path):
    write_model(tmp_path, "Llama", {"attention_bias": True})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.o_proj\.bias"):
        load_decoder(tmp_path)


def test_damaged_weights_are_a_model_error(tmp_path: Path):
    write_model(tmp_path, *MODELS["llama, tied"])
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="pull"):
        load_decoder(tmp_path)
