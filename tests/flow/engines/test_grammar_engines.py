"""Constrained and free requests in one batch, on both cores: each draws what it would draw alone, and every reply is valid JSON."""

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import jsonschema
import pytest

pytest.importorskip("llguidance")

from grammar_cases import SCHEMA, Model, replies
from llguidance import LLExecutor

from penstock.engines.embedded import lanes, sampling
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.sampling import GrammarCompiler
from penstock.errors import EngineError
from penstock.records import ReplyGrammar


@dataclass
class Repeated:
    """Stands in for a captured graph, which needs a GPU."""

    replay: Callable[[], None]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("threads", [False, True])
def test_both_cores_draw_the_same_tokens_whoever_shares_the_batch(graphs: bool, threads: bool, monkeypatch: pytest.MonkeyPatch):
    def capture(_: lanes.Lanes, work: Callable[[], None]) -> Repeated:
        work()  # as the real one does, to warm up
        return Repeated(work)

    def executor() -> LLExecutor:
        asked.append(True)
        return several

    monkeypatch.setattr(lanes.Lanes, "_capture_work", capture)  # CUDA has no stand-in on a CPU
    asked, several = [], LLExecutor(3)
    settings = {"MAX_LEXERS": 3, "COMPILED_ONCE_S": 60.0, "STATES_PER_LEXER": 4, "FEW_STATES": 4, "_executor": executor}
    for name, value in settings.items() if threads else ():
        monkeypatch.setattr(sampling, name, value)  # as on a machine with more cores, and with more requests
    model = Model.load()
    samplings = model.samplings(24)
    alone = asyncio.run(replies(model.engine(paged=False), model, samplings, together=False))
    paged = model.engine(paged=True, graphs=graphs, max_steps=3)
    for engine in (model.engine(paged=False), paged):
        for found, expected in zip(asyncio.run(replies(engine, model, samplings, together=True)), alone, strict=True):
            assert found[0] == expected[0] and found[2] == expected[2]
            assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert bool(asked) == threads
    complete = [ids for (ids, _, finish), each in zip(alone, samplings, strict=True) if each.grammar and finish == "stop"]
    assert len(complete) > 5
    for ids in complete:
        jsonschema.validate(json.loads(model.renderer.tokenizer.decode(ids)), SCHEMA)


@pytest.mark.parametrize("paged", [False, True])
def test_weights_may_change_while_a_reply_follows_its_grammar(paged: bool):
    model = Model.load()

    async def main():
        engine = model.engine(paged=paged)
        asked = replace(model.samplings(2)[1], temperature=1.0, max_tokens=250)
        ids, versions = [], []
        try:
            async for chunk in engine.generate(model.prompt, asked):
                ids += chunk.ids
                versions += chunk.versions
                if len(ids) >= 5 and engine.version == 0:
                    await engine.swap(1, lambda: engine.decoder.norm.weight.data.mul_(1.1))
        finally:
            await engine.close()
        return ids, versions

    ids, versions = asyncio.run(main())
    assert set(versions) == {0, 1}
    jsonschema.validate(json.loads(model.renderer.tokenizer.decode(ids)), SCHEMA)


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone():
    model = Model.load()

    async def main():
        engine = model.engine(paged=False)
        broken, fine = (replace(model.samplings(2)[1], grammar=each) for each in (ReplyGrammar(lark="start: x"), model.grammar))
        try:
            with pytest.raises(EngineError, match="compiled"):
                await anext(engine.generate(model.prompt, broken))
            return [chunk async for chunk in engine.generate(model.prompt, fine)][-1].finish
        finally:
            await engine.close()

    assert asyncio.run(main()) in ("stop", "length")


class FailingState(sampling.GrammarState):
    """Fails at the fifth token, as a grammar does that reaches a limit of the library."""

    followed = 0

    def advance(self, token_id: int) -> bool:
        self.followed += 1
        return super().advance(token_id if self.followed < 5 else SPECIAL)


SPECIAL = 0
"""A token that no JSON has."""


@pytest.mark.parametrize("paged", [False, True])
def test_grammar_that_fails_while_it_is_followed_fails_request_alone(paged: bool, monkeypatch: pytest.MonkeyPatch):
    def start(compiler: GrammarCompiler, grammar: ReplyGrammar, stop_ids: Collection[int]) -> sampling.GrammarState:
        state = real(compiler, grammar, stop_ids)
        return FailingState(state.matcher, state.lexer) if grammar is failing.grammar else state

    model = Model.load()
    fine = replace(model.samplings(2)[1], temperature=1.0)
    failing = replace(fine, grammar=replace(model.grammar, lark=model.grammar.lark + "\n"))
    [(expected, _, _)] = asyncio.run(replies(model.engine(paged=False), model, [fine], together=False))
    real = GrammarCompiler.start
    monkeypatch.setattr(GrammarCompiler, "start", start)  # real limits take long to reach

    async def main():
        engine = model.engine(paged=paged)
        try:
            async with asyncio.TaskGroup() as group:
                ids, other = group.create_task(failed(engine)), group.create_task(replies_of(engine))
            return ids.result(), other.result()
        finally:
            await engine.close()

    async def failed(engine: EmbeddedEngine) -> list[int]:
        ids: list[int] = []
        with pytest.raises(EngineError, match="followed"):
            async for chunk in engine.generate(model.prompt, failing):
                ids += chunk.ids
        return ids

    async def replies_of(engine: EmbeddedEngine) -> list[int]:
        return [token_id async for chunk in engine.generate(model.prompt, fine) for token_id in chunk.ids]

    cut, whole = asyncio.run(main())
    assert (cut, whole) == (expected[:4], expected)
