"""Constrained and free requests of the tiny model, for tests of engines."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.chat.renderer import Renderer
from penstock.engines.embedded.core import EngineCore
from penstock.engines.embedded.decoder import load_decoder
from penstock.engines.embedded.engine import EmbeddedEngine, end_ids
from penstock.engines.embedded.paged_core import PagedCore
from penstock.engines.embedded.sampling import GrammarCompiler
from penstock.models.pull import resolve
from penstock.records import ReplyFormat, ReplyGrammar, Sampling

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9999}, "word": {"enum": ["one", "two", "twofold"]}},
    "required": ["n", "word"],
    "additionalProperties": False,
}


@dataclass
class Model:
    renderer: Renderer
    folder: Path
    prompt: tuple[int, ...]
    grammar: ReplyGrammar

    @classmethod
    def load(cls) -> "Model":
        folder = resolve("tiny", lambda *_: None).path
        renderer = Renderer.load(folder)
        prompt = renderer.root([{"role": "user", "content": "3 * 4"}])
        return cls(renderer, folder, prompt, renderer.reply_grammar(ReplyFormat(schema=SCHEMA), (), frozenset(), prompt=prompt))

    def engine(self, paged: bool, *, device: str = "cpu", **options: object) -> EmbeddedEngine:
        decoder = load_decoder(self.folder, device=device)
        make = PagedCore if paged else EngineCore
        core = make(decoder, slots=16, cache_tokens=8192, decode=self.renderer.tokenizer.decode, **options)
        compiler = GrammarCompiler(self.folder, decoder.shape.vocab_size)
        return EmbeddedEngine(core, name="tiny", queue_limit=64, seed=0, stop_ids=end_ids(self.folder), grammars=compiler)

    def samplings(self, count: int) -> list[Sampling]:
        """Every third request is free; some are tempered, greedy or truncated."""
        kinds = [Sampling(), Sampling(temperature=0.8), Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.0)]
        stops, bound = self.renderer.stop_ids, [None, self.grammar, self.grammar]
        return [replace(kinds[at % 5], max_tokens=70, seed=at, stop_ids=stops, grammar=bound[at % 3]) for at in range(count)]


async def replies(engine: EmbeddedEngine, model: Model, samplings: list[Sampling], *, together: bool):
    async def one(sampling: Sampling):
        chunks = [chunk async for chunk in engine.generate(model.prompt, sampling)]
        return [i for chunk in chunks for i in chunk.ids], [x for chunk in chunks for x in chunk.logprobs], chunks[-1].finish

    try:
        if not together:
            return [await one(sampling) for sampling in samplings]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(sampling)) for sampling in samplings]
        return [task.result() for task in tasks]
    finally:
        await engine.close()
