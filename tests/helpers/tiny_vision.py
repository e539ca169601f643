"""A tiny model of pictures with random weights, in the form of Idefics3, whose processor needs Pillow alone; and pictures."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from penstock.testing import write_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TILE, PATCH = 16, 4
"""Pixels. A picture is scaled to two tiles on its longer side, and each tile has four tokens."""
MARKS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]


def write_vision_tokenizer(folder: Path) -> HfTokenizer:
    write_tokenizer(folder, template=TEMPLATE)
    core = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*MARKS, *TILES]])
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return core


def write_tiny_vision(folder: Path) -> Path:
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    core = write_vision_tokenizer(folder)
    text = LlamaConfig(
        vocab_size=core.get_vocab_size() + 5,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=core.token_to_id("<|im_end|>"),
        bos_token_id=None,
        pad_token_id=None,
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "image_size": TILE,
        "patch_size": PATCH,
    }
    image = core.token_to_id("<image>")
    config = Idefics3Config(vision_config=vision, text_config=text, image_token_id=image, pad_token_id=None)
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    pictures = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "size": {"longest_edge": 2 * TILE},
        "max_image_size": {"longest_edge": TILE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    own = {"processor_class": "Idefics3Processor", "image_seq_len": (TILE // PATCH // 2) ** 2}
    (folder / "processor_config.json").write_text(json.dumps(own))
    return folder


def png(red: int, green: int, blue: int, *, width: int = 32, height: int = 32) -> bytes:
    """A picture of one colour."""
    rows = (b"\0" + bytes((red, green, blue)) * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    packed = (struct.pack(">I", len(of)) + kind + of + struct.pack(">I", zlib.crc32(kind + of)) for kind, of in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


RED, BLUE = png(255, 0, 0), png(0, 0, 255, width=64, height=20)


def url_of(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def image(picture: bytes) -> dict[str, Any]:
    """A picture as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url_of(picture)}}
