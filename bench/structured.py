"""Tokens per second under a JSON schema over the same requests without one: 32 at once, one engine, one run.

The schema asks for a list of objects that is longer than the replies, so that every reply has all its tokens. It is measured with
strings of any length, and with strings of at most 30 characters, whose masks take several times as long. Rounds alternate and
medians are compared: machines are noisy. On a GPU if there is one.
"""

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from penstock.chat.renderer import Renderer
from penstock.config import EmbeddedSection
from penstock.engines.embedded.decoder import load_decoder
from penstock.engines.embedded.engine import EmbeddedEngine, make_core, pick_device, pick_dtype
from penstock.engines.embedded.sampling import GrammarCompiler
from penstock.models import resolve
from penstock.records import ReplyFormat, ReplyGrammar, Sampling
from penstock.system.processes import relax_gc

BATCH, ROUNDS = 32, 3
NAMES: dict[str, dict[str, Any]] = {
    "strings of any length": {"type": "string"},
    "short strings": {"type": "string", "maxLength": 30},
}


def schema(name: dict[str, Any]) -> dict[str, Any]:
    person: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": name,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": person, "minItems": 100}


def main(folder: Path | None = None) -> None:
    relax_gc()  # as `penstock` does
    asyncio.run(_compare(folder or resolve("smollm2-135m").path))


async def _compare(folder: Path) -> None:
    renderer = Renderer.load(folder)
    device = pick_device("auto")
    cuda = device.type == "cuda"
    decoder = load_decoder(folder, device=device, dtype=pick_dtype("auto", device))
    grammars = GrammarCompiler(folder, decoder.shape.vocab_size)
    # Without stop ids, so that free replies have all their tokens too.
    engine = EmbeddedEngine(make_core(decoder, EmbeddedSection()), name="bench", queue_limit=64, seed=0, grammars=grammars)
    tokens = 256 if cuda else 24
    prompt = renderer.root([{"role": "user", "content": "List some people as JSON."}])
    asked: dict[str, ReplyGrammar | None] = {"free": None}
    for kind, name in NAMES.items():
        asked[kind] = renderer.reply_grammar(ReplyFormat(schema=schema(name)), (), frozenset(), prompt=prompt)
    rates: dict[str, list[float]] = {kind: [] for kind in asked}
    for grammar in asked.values():
        await _rate(engine, prompt, renderer, grammar, 8)
    for _ in range(ROUNDS):
        for kind, grammar in asked.items():
            rates[kind].append(await _rate(engine, prompt, renderer, grammar, tokens))
    await engine.close()
    free, where = statistics.median(rates.pop("free")), "GPU" if cuda else "CPU"
    for kind, found in rates.items():
        bound = statistics.median(found)
        verdict = "" if bound >= 0.8 * free else "  BEHIND"
        rate = f"{bound / free:.2f} x ({bound:,.0f} over {free:,.0f} tokens/s)"
        print(f"structured, {kind}, {BATCH} at once on a {where}: {rate}{verdict}", flush=True)


async def _rate(
    engine: EmbeddedEngine, prompt: tuple[int, ...], renderer: Renderer, grammar: ReplyGrammar | None, tokens: int
) -> float:
    async def read(seed: int) -> int:
        asked = Sampling(max_tokens=tokens, seed=seed, grammar=grammar, stop_ids=renderer.stop_ids if grammar else ())
        return sum([len(chunk.ids) async for chunk in engine.generate(prompt, asked)])

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(seed)) for seed in range(BATCH)]
    assert all(task.result() == tokens for task in tasks)
    return BATCH * tokens / (time.perf_counter() - started)
