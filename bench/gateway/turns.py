"""One rollout of 100 turns through the gateway's application, without a socket: processor time per turn, against rendering anew.

What an agent sends grows with every turn; what the gateway does with it should not.
"""

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import orjson

from bench.gateway.servers import SAID, ReadyEngine
from penstock.chat.renderer import Renderer
from penstock.gateway import Gateway
from penstock.records import Sampling, Task, make_rollout
from penstock.testing import memory_pool, write_tokenizer

TURNS, REPETITIONS = 100, 5
EARLY, LATE = range(7, 13), range(94, 100)
QUESTION = {"role": "user", "content": "Then tell me what comes next, and why it does. " * 24}
"""About 1.2 KB, as a tool's result has."""


def turns(folder: Path) -> dict[str, float | int]:
    """Processor time of turn 100 over turn 10, and what rendering the whole history anew would cost in their place."""
    model = write_tokenizer(folder / "turns", corpus=[SAID * 20, QUESTION["content"]], vocab_size=600)
    renderer = Renderer.load(model)
    runs = [asyncio.run(_run(renderer)) for _ in range(REPETITIONS)]
    early, late = (median(run.spent[turn] for run in runs for turn in span) for span in (EARLY, LATE))
    anew = median(_anew(renderer, runs[-1].talk[: 2 * turn + 1]) for turn in LATE)
    return {
        "turns.late_over_early": late / early,
        "turns.early_us": early * 1e6,
        "turns.late_us": late * 1e6,
        "turns.rendering_anew_over_ours": anew / late,
    }


class Run(NamedTuple):
    spent: list[float]
    """Seconds in the gateway, for each turn."""
    talk: list[dict[str, Any]]
    """What was said, the last answer included."""


async def _run(renderer: Renderer) -> Run:
    engine = ReadyEngine([], renderer.tokenizer)
    engine.answer(renderer.tokenizer.encode(SAID * 50)[:199] + list(renderer.stop_ids[:1]))
    pool, rollout = memory_pool(), make_rollout("train-0", "t", 0)
    await pool.open_group(Task(id="t", prompt=(QUESTION,)), [rollout], seq=0)
    gateway = Gateway(engine, renderer, pool, secret=b"a secret for benchmarks")
    session = gateway.open(rollout, Sampling(max_tokens=1024))
    talk: list[dict[str, Any]] = [QUESTION]
    spent: list[float] = []
    for _ in range(TURNS):
        body = orjson.dumps({"model": "any", "messages": talk})
        start = time.process_time()
        answer = await _post(gateway, session.token, body)
        spent.append(time.process_time() - start)
        talk += [orjson.loads(answer)["choices"][0]["message"], QUESTION]
    return Run(spent, talk)


def _anew(renderer: Renderer, talk: list[dict[str, Any]]) -> float:
    """Seconds to render and tokenize a whole history. Between the turns, it would drive what they need out of the caches."""
    start = time.process_time()
    renderer.root(talk)
    return time.process_time() - start


async def _post(gateway: Gateway, token: str, body: bytes) -> bytes:
    parts: list[bytes] = []
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + token.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    await gateway.app(scope, receive, send)
    return b"".join(parts)
