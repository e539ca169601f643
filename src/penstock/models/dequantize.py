"""The process that `convert` starts: reads a GGUF file with transformers and writes a model folder."""

import sys
from pathlib import Path

import orjson


def main(file: Path, folder: Path) -> None:
    """Write config, float32 weights and tokenizer of the model in `file` into `folder`."""
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    place, name = str(file.parent), file.name
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    _tidy(folder)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32, quantization_config=plain)
    model.save_pretrained(folder, max_shard_size="1TB")


def _tidy(folder: Path) -> None:
    """Put the chat template into `tokenizer_config.json`, where every tool looks, and drop what only told of the loading."""
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
