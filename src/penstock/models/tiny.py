"""The tiny policy for fast tests: half a million weights that call a multiply tool and are often wrong.

Its tokens are bytes and the dozen words of its task, which takes two turns and fifteen sampled tokens:

    user       3*7
    assistant  <tool_call>
               {"name": "multiply", "arguments": {"a": 3, "b": 7}}
               </tool_call>
    user       <tool_response>
               21
               </tool_response>
    assistant  21

Calls may be text or `tool_calls`, results text or messages of role `tool`: the chat template renders both the same way. The prompt
says only whether tools are offered, and leaves out system texts: their content would be noise to so small a model. `pretrain`
makes the weights. The operands are chosen so that every product has two digits.
"""

import json
import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.models.cache import PullProgress
from penstock.records import Message

VERSION = "4"
"""Increase it with every change of the weights or the tokenizer."""

START, END, PAD = 256, 257, 258
"""Ids of the special tokens; a byte's id is its value."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
CONTEXT_LENGTH = 1024

WORDS = (
    *("user", "assistant", "tools"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "', '", "arguments":', ' {"a": ', ', "b": ', "}}"),
    *("multiply", "subtract", "division"),
)
"""Tokens of more than one byte; their ids follow the special ones."""

CHAT_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>tools<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TASKS = tuple(product(range(2, 10), range(5, 10)))
"""All operand pairs (a, b)."""

TOOL_NAMES = ("multiply", "subtract", "division")
"""The right tool, and those that the policy confuses with it; of equal length, since so small a model counts positions."""

REFUSED = "no"
"""The tool's answer to an invalid call."""


def tiny_task(a: int, b: int) -> list[Message]:
    return [{"role": "user", "content": f"{a}*{b}"}]


def tiny_call(a: int, b: int, name: str = "multiply") -> Message:
    """The assistant's call, as text in the Hermes form."""
    call = json.dumps({"name": name, "arguments": {"a": a, "b": b}})
    return {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}


def tiny_tool(name: str, arguments: Any) -> str:
    """The tool's answer to a call: the product, or REFUSED. Arguments are JSON text or its value."""
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(int(values["a"]) * int(values["b"])) if name == "multiply" else REFUSED
    except (ValueError, LookupError, TypeError):
        return REFUSED


def tiny_result(result: str) -> Message:
    """The tool's answer as the model reads it; the chat template renders a message of role `tool` the same way."""
    return {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}


def tiny_reward(answer: str | None, a: int, b: int) -> float:
    """1 if the last reply is the product and nothing else, else 0."""
    return float(answer is not None and answer.strip() == str(a * b))


def conversation(a: int, b: int) -> list[Message]:
    result = tiny_tool("multiply", {"a": a, "b": b})
    return [*tiny_task(a, b), tiny_call(a, b), tiny_result(result), {"role": "assistant", "content": result}]


def copy_conversation(rng: random.Random) -> list[Message]:
    """A right call and answer, with a random number as the result: the model must learn to copy it."""
    a, b = rng.choice(TASKS)
    number = str(rng.randrange(10, 100))
    return [*tiny_task(a, b), tiny_call(a, b), tiny_result(number), {"role": "assistant", "content": number}]


def mistaken_conversation(rng: random.Random, *, wrong_call: float, wrong_answer: float) -> list[Message]:
    """A conversation with errors at these rates: another tool or operand in the call; a random number as the answer."""
    a, b = rng.choice(TASKS)
    name, x, y = "multiply", a, b
    if rng.random() < wrong_call:
        fault = rng.choice(("name", "name", "a", "b"))
        name = rng.choice(TOOL_NAMES[1:]) if fault == "name" else name
        x = rng.choice([other for other in range(2, 10) if other != a]) if fault == "a" else x
        y = rng.choice([other for other in range(5, 10) if other != b]) if fault == "b" else y
    result = tiny_tool(name, {"a": x, "b": y})
    guesses = result == REFUSED or rng.random() < wrong_answer
    answer = str(rng.randrange(10, 100)) if guesses else result
    return [*tiny_task(a, b), tiny_call(x, y, name), tiny_result(result), {"role": "assistant", "content": answer}]


def encode(messages: list[Message], *, tools: bool = False) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, as the chat template renders it, and which of them the assistant wrote."""
    ids = _ids(f"{SPECIAL[0]}tools{SPECIAL[1]}\n") if tools else []
    written = [False] * len(ids)
    for message in messages:
        own = message["role"] == "assistant"
        head, body = _ids(f"{SPECIAL[0]}{message['role']}\n"), _ids(f"{message['content']}{SPECIAL[1]}")
        ids += [*head, *body, *b"\n"]
        written += [*[False] * len(head), *[own] * len(body), False]
    return ids, written


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))


def make(folder: Path, progress: PullProgress) -> None:
    """Fill `folder` with the tiny policy."""
    from penstock.models.pretrain import pretrain

    write_tokenizer(folder)
    pretrain(folder, progress)


@cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in WORDS])
    return tokenizer


def _ids(text: str) -> list[int]:
    return _tokenizer().encode(text).ids


def _alphabet() -> list[str]:
    """The printable characters by which a byte-level tokenizer writes bytes, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
