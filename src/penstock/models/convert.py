"""Conversion of GGUF files to model folders: transformers dequantizes them to float32 safetensors, in a child process.

The child's memory is freed when it ends, its progress bars are not shown, and nothing is imported into our process.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copyfileobj

import orjson

from penstock.errors import ModelError
from penstock.system.processes import last_line, module_command

CHILD = "penstock.models.convert"
NEEDS = ("torch", "transformers", "accelerate", "gguf", "safetensors")


def convert_gguf(file: Path, folder: Path) -> None:
    """Fill `folder` with the model in `file`; ModelError says why it cannot be converted."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"{file} is not a GGUF file, whatever its name says; fetch it again")
    command = [*module_command(CHILD), str(file), str(folder)]
    result = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    if result.returncode == 0:
        return
    if "No space left on device" in result.stderr:
        raise ModelError(f"the disk is full: {file.name} could not be converted; free some space, or set PENSTOCK_CACHE")
    reason = last_line(result.stderr) or f"ended with status {result.returncode}"
    raise ModelError(f"{file.name} cannot be converted: {reason}; give a GGUF file of a model that transformers can read")


def unzip(archive: Path, member: str, target: Path) -> Path:
    """Write one member of `archive` to `target`."""
    with zipfile.ZipFile(archive) as opened, opened.open(member) as source, target.open("wb") as copy:
        copyfileobj(source, copy, 1 << 20)
    return target


def main(file: Path, folder: Path) -> None:
    """The child process: write config, float32 weights and tokenizer of the model in `file` into `folder`."""
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source, name = str(file.parent), file.name
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    _merge_template(folder)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32, quantization_config=plain)
    model.save_pretrained(folder, max_shard_size="1TB")


def _merge_template(folder: Path) -> None:
    """Move the chat template into `tokenizer_config.json`, where every tool looks, and drop settings of the loading itself."""
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = orjson.loads(file.read_bytes())
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
        template.unlink()
    file.write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
