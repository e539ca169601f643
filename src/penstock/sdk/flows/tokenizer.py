"""The model's tokenizer for flows that want one: loaded when first used, once for each process."""

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.records import Message


def load(source: Any) -> Any:
    """A tokenizer of `transformers` out of the model folder that `source` names; anything else as it is."""
    return _loaded(Path(source)) if isinstance(source, str | Path) else source


def render(tokenizer: Any, messages: list[Message], options: Mapping[str, Any], *, reply: bool = True) -> list[int]:
    """The token ids of messages, ready for a reply."""
    if tokenizer is None:
        raise ConfigError("this flow has no tokenizer; give AgentFlowBase(tokenizer=…), or call gateway_generate with messages")
    known = {name: value for name, value in options.items() if value is not None}
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=reply, tokenize=True, **{"return_dict": False, **known})
    return cast("list[int]", ids["input_ids"] if isinstance(ids, Mapping) else ids)


def preamble(tokenizer: Any, options: Mapping[str, Any]) -> list[int]:
    """What the template puts before the first message: what one message has and a second one does not add."""
    message: Message = {"role": "user", "content": "."}
    one, two = (render(tokenizer, [message] * count, options, reply=False) for count in (1, 2))
    return one[: max(0, 2 * len(one) - len(two))]


@cache
def _loaded(folder: Path) -> Any:
    if not folder.is_dir():
        raise ConfigError(f"self.tokenizer: {folder} is not on this machine; share the model's folder, or send messages instead")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as cause:
        raise ConfigError("self.tokenizer needs the `transformers` package: pip install transformers") from cause
    return transformers.AutoTokenizer.from_pretrained(folder)
