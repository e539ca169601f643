"""Promise 1 over generated conversations: every prompt begins with the exact ids that came before, whatever was sampled."""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_conversations import GatewayPair, RandomConversation, scripted
from random_replies import Sample

from penstock.chat.renderer import Renderer
from penstock.gateway import GatewayLimits
from penstock.gateway.graph import HISTORY_EDITED, REPLY_EDITED, TEMPLATE_REWRITES, TOOLS_CHANGED
from penstock.testing import ScriptedEngine, memory_pool, workbench
from templates.template_cases import FAMILIES, renderer, tokenizer

CONVERSATIONS = int(os.environ.get("PENSTOCK_CONVERSATIONS") or (100 if os.environ.get("PENSTOCK_FAULTS") == "full" else 40))
"""For each template."""
APPEND_ONLY = ("chatml", "smollm2", "smollm2 itself", "qwen2.5", "mistral v7", "gemma")
"""Families whose templates never rewrite what came before."""


async def converse(name: str, randoms: list[Random], model: Renderer | None = None) -> Counter[str]:
    """One conversation for each source of chance; what happened in them."""
    script: deque[Sample] = deque()
    model = model or renderer(name)
    engine = ScriptedEngine(lambda _: scripted(script.popleft()), model.tokenizer, chunk=3)
    pool = memory_pool()
    async with AsyncExitStack() as stack:
        limits = GatewayLimits(calls_per_s=1e6)
        benches = [await stack.enter_async_context(workbench(engine, model, pool=pool, limits=limits)) for _ in range(2)]
        pair = GatewayPair(name, (benches[0].gateway, benches[1].gateway), engine, script, pool, Counter())
        for random in randoms:
            await RandomConversation(pair, random).run()
    return pair.counts


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_prompt_begins_with_the_exact_tokens_that_came_before(name, capsys):
    counts = asyncio.run(converse(name, [Random(f"{name} {seed}") for seed in range(CONVERSATIONS)]))
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    assert counts["conversations"] == CONVERSATIONS
    assert not (counts[f"root: {TEMPLATE_REWRITES}"] and name in APPEND_ONLY)


def renderer_with(name: str, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Renderer:
    """A renderer whose bridge is proven, and then changes its glue."""
    model = Renderer(tokenizer(name))
    glue = model.bridge.glue

    def changed(*arguments: Any, **options: Any) -> tuple[int, ...] | None:
        ids = glue(*arguments, **options)
        return None if ids is None else change(ids)

    model.bridge.glue = changed
    return model


MUTATIONS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "drops the first token": lambda ids: ids[1:],
    "drops the last token": lambda ids: ids[:-1],
    "drops a token in its midst": lambda ids: ids[: len(ids) // 2] + ids[len(ids) // 2 + 1 :],
    "says the first token twice": lambda ids: ids[:1] + ids,
    "says the last token twice": lambda ids: ids + ids[-1:],
    "adds a token before": lambda ids: (0, *ids),
    "adds a token after": lambda ids: (*ids, 0),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_bridge_that_drops_or_adds_one_token_is_found_out(mutation):
    model = renderer_with("chatml", MUTATIONS[mutation])
    with pytest.raises(AssertionError):
        asyncio.run(converse("chatml", [Random(seed) for seed in range(20)], model))


def test_an_unchanged_bridge_is_not():
    model = renderer_with("chatml", lambda ids: ids)
    counts = asyncio.run(converse("chatml", [Random(seed) for seed in range(20)], model))
    assert counts["bridged: nothing broke"] > 20


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(list(FAMILIES)), random=st.randoms(use_true_random=False))
def test_whatever_is_tried_to_break_it(name, random):
    asyncio.run(converse(name, [random]))


def test_the_page_on_the_graph_names_every_reason():
    page = (Path(__file__).parents[3] / "docs" / "design" / "token-graph.md").read_text()
    assert all(f"| `{reason}` |" in page for reason in (HISTORY_EDITED, REPLY_EDITED, TOOLS_CHANGED, TEMPLATE_REWRITES))
