"""Chat templates of the common model families, written from their documented formats, each with a small its own tokenizer.

Every family's control tokens are single tokens, marked special or not as in the family's own tokenizer; all other text is
byte-level BPE with a few hundred merges, so that most texts have many tokenizations.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from penstock.chat.renderer import Renderer
from penstock.chat.tokenizer import BYTE_OF, Tokenizer
from penstock.config import cache_folder

HERE = Path(__file__).parent
CORPUS = [
    'What is 6 times 7? It is 42. The user asks, the assistant answers: {"name": "multiply", "arguments": {"a": 6, "b": 7}}\n' * 30,
    "<tool_call>\n</tool_call>\n<tool_response>\n</tool_response> <think>\n\n</think>\n\nfunctions.multiply commentary final\n"
    * 20,
    "Today Date: system user assistant model developer tool to=functions json analysis 日本 é 🙂 \n\n" * 20,
]


@dataclass(frozen=True)
class Family:
    """One template and the tokens that it is made of."""

    template: str
    special: tuple[str, ...]
    """Control tokens that the tokenizer marks as special."""
    plain: tuple[str, ...] = ()
    """Tokens of their own that it does not."""
    bos: str = ""
    ends: tuple[str, ...] = ()
    """What ends a reply, first of all the `eos_token`."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Variables that the template is always given."""


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
BRACKETS = tuple(f"[{slash}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "SYSTEM_PROMPT") for slash in ("", "/"))
SEEK = ("begin▁of▁sentence", "end▁of▁sentence")
SEEK_PLAIN = (
    *("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep"),
    *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
)
CHANNELS = ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext")


def _seek(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"<\uff5c{name}\uff5c>" for name in names)


def _deepseek(**settings: Any) -> Family:
    begin, end = _seek(SEEK)
    return Family("deepseek", (begin, end), (*_seek(SEEK_PLAIN), "<think>", "</think>"), begin, (end,), settings)


def _mistral(name: str) -> Family:
    return Family(name, ("<s>", "</s>", *BRACKETS, "[TOOL_CALLS]", "[TOOL_CONTENT]"), (), "<s>", ("</s>",))


FAMILIES: dict[str, Family] = {
    "chatml": Family("chatml", CHATML, ends=("<|im_end|>",)),
    "smollm2": Family("smollm2", CHATML, ends=("<|im_end|>",)),
    "qwen2.5": Family("qwen25", CHATML, THINK[2:], ends=("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family("qwen3", CHATML, THINK, ends=("<|im_end|>", "<|endoftext|>")),
    "qwen3 without thinking": Family(
        "qwen3", CHATML, THINK, ends=("<|im_end|>", "<|endoftext|>"), settings={"enable_thinking": False}
    ),
    "llama3": Family(
        "llama3", (*HEADERS, "<|python_tag|>"), (), "<|begin_of_text|>", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    ),
    "mistral v3": _mistral("mistral_v3"),
    "mistral v7": _mistral("mistral_v7"),
    "gemma": Family("gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), (), "<bos>", ("<end_of_turn>", "<eos>")),
    "deepseek v3": _deepseek(opens_thinking=False),
    "deepseek r1": _deepseek(opens_thinking=True),
    "harmony": Family("harmony", tuple(f"<|{name}|>" for name in CHANNELS), ends=("<|return|>", "<|call|>", "<|endoftext|>")),
}


REAL = cache_folder() / "models" / "smollm2-135m"
if (REAL / "tokenizer.json").is_file():
    FAMILIES["smollm2 itself"] = Family("", CHATML, ends=("<|im_end|>",))
    """The model's own tokenizer and template, where it was pulled."""


@cache
def tokenizer(name: str) -> Tokenizer:
    """The family's tokenizer, template included."""
    family = FAMILIES[name]
    if not family.template:
        return Tokenizer.load(REAL)
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(BYTE_OF), show_progress=False))
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    ends = [core.token_to_id(text) for text in family.ends]
    named = family.settings | {"bos_token": family.bos, "eos_token": family.ends[0]}
    source = (HERE / f"{family.template}.jinja").read_text(encoding="utf-8")
    return Tokenizer(core, template=source, named=named, eos_ids=[token_id for token_id in ends if token_id is not None])


@cache
def renderer(name: str) -> Renderer:
    """The family's renderer; making it runs the bridge's check."""
    return Renderer(tokenizer(name))
