"""Random JSON schemas: every complete reply is valid under its schema. 25 of them, 500 in `make test-faults`."""

import asyncio
import json
import os
import random

import jsonschema
import pytest
from random_schemas import random_schema

pytest.importorskip("llguidance")

from penstock.chat.grammars import grammar_problem
from penstock.chat.renderer import Renderer
from penstock.config import EmbeddedSection
from penstock.engines.embedded.engine import EmbeddedEngine, open_engine
from penstock.models.pull import resolve
from penstock.records import ReplyFormat, Sampling

FULL = os.environ.get("PENSTOCK_FAULTS") == "full"
COUNT = 500 if FULL else 25
AT_ONCE = 25


@pytest.mark.parametrize(
    "model", ["tiny", pytest.param("smollm2-135m", marks=pytest.mark.skipif(not FULL, reason="make test-faults"))]
)
def test_every_complete_reply_is_valid_under_its_schema(model: str):
    folder = resolve(model, lambda *_: None).path
    renderer = Renderer.load(folder)
    prompt = renderer.root([{"role": "user", "content": "Give an example as JSON."}])

    async def check(engine: EmbeddedEngine, seed: int) -> bool:
        schema = random_schema(random.Random(seed))
        grammar = renderer.reply_grammar(ReplyFormat(schema=schema), (), frozenset(), prompt=prompt)
        assert grammar_problem(grammar.lark) == ""
        asked = Sampling(max_tokens=500, seed=seed, grammar=grammar, stop_ids=renderer.stop_ids)
        chunks = [chunk async for chunk in engine.generate(prompt, asked)]
        if chunks[-1].finish != "stop":
            return False
        text = renderer.tokenizer.decode([i for chunk in chunks for i in chunk.ids])
        jsonschema.validate(json.loads(text), schema)
        return True

    async def main() -> int:
        engine = open_engine(folder, name=model, section=EmbeddedSection(device="cpu"), seed=0)
        try:
            complete = 0
            for first in range(0, COUNT, AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(check(engine, seed)) for seed in range(first, first + AT_ONCE)]
                complete += sum(task.result() for task in tasks)
            return complete
        finally:
            await engine.close()

    assert asyncio.run(main()) > 0.8 * COUNT
