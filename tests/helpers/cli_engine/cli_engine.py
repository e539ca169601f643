"""An engine for gateways in processes of their own: `--engine cli_engine:open_engine`, with this folder in PYTHONPATH."""

from pathlib import Path
from typing import Any

from penstock.chat.tokenizer import Tokenizer
from penstock.testing import Reply, ScriptedEngine, ScriptedReply


def open_engine(folder: Path, *, name: str, **_: Any) -> ScriptedEngine:
    tokenizer = Tokenizer.load(folder)

    def reply(prompt: tuple[int, ...]) -> Reply:
        stalls = "stall" in tokenizer.decode(prompt)
        return ScriptedReply(f"{len(prompt)} tokens", stall_after=2 if stalls else None)

    return ScriptedEngine(reply, tokenizer, model=name)


def open_endless(folder: Path, *, name: str, **_: Any) -> ScriptedEngine:
    """It ends no reply on its own."""
    tokenizer = Tokenizer.load(folder)
    words = ScriptedReply(ids=tokenizer.encode("on and on ") * 1000, finish="length")
    return ScriptedEngine(lambda _: words, tokenizer, model=name, context_length=2048, chunk=64)
