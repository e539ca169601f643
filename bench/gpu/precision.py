"""Does a run in bfloat16 learn per step as in float32? One-turn multiply calls by SmolLM2, without gateway or pool.

    float32     weights, masters and gradients in float32
    nearest     bfloat16 weights, masters copied from them, published rounded to the nearest: as it was before
    bfloat16    bfloat16 weights, masters from the file, published by seeded rounding: the default on a GPU
    published   the same from a file that is in bfloat16 already
    control     bfloat16, not trained: what the rewards vary by chance

`python -m bench.gpu.precision FOLDER [seeds] [steps] [variant]`; the folder is a SmolLM2-135M-Instruct.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoTokenizer

from bench.gpu.one_turn import is_call
from penstock.config import EmbeddedSection, TrainSection
from penstock.engines.embedded.decoder import read_weights
from penstock.engines.embedded.engine import EmbeddedEngine, open_engine
from penstock.records import Sampling, Sequence
from penstock.train import precision
from penstock.train.learner import Learner

TASKS = Path(__file__).parents[2] / "examples" / "multiply" / "tasks.jsonl"
GROUPS, ROLLOUTS, REPLY = 4, 8, 48
RATE = 2e-5
WANTED = 0.95
VARIANTS = ("float32", "nearest", "bfloat16", "published", "control")


def main(folder: Path, seeds: int = 3, steps: int = 12, *, variants: Iterable[str] = VARIANTS) -> None:
    for variant in variants:
        for seed in range(seeds):
            started = time.perf_counter()
            rewards, share, gap = asyncio.run(learn(folder, variant, seed=seed, steps=steps))
            reached = next((at + 1 for at, reward in enumerate(rewards) if reward >= WANTED), None)
            print(
                f"{variant:9} seed {seed}: {' '.join(f'{reward:.2f}' for reward in rewards)}; {WANTED} at step {reached}, "
                f"served share {share:.3f}, log-probability gap {gap:.3f}, {time.perf_counter() - started:.1f} s",
                flush=True,
            )


async def learn(folder: Path, variant: str, *, seed: int, steps: int) -> tuple[list[float], float, float]:
    """Returns the mean reward of each step, the mean share of its updates that was served, and the mean log-probability gap."""
    dtype = "float32" if variant == "float32" else "bfloat16"
    section = EmbeddedSection.model_validate({"dtype": dtype, "slots": GROUPS * ROLLOUTS, "cache_tokens": 16384})
    engine = open_engine(folder, name="policy", section=section, seed=seed)
    rng = random.Random(seed)
    tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(folder)
    rows = [json.loads(line) for line in TASKS.read_text().splitlines()]
    try:
        with _rounding(variant):
            rate = 0.0 if variant == "control" else RATE
            learner = Learner(engine.decoder, TrainSection(lr=rate), exact=_exact(folder, variant), seed=seed)
            await engine.swap(0, learner.publish)
            rewards, shares, gaps = list[float](), list[float](), list[float]()
            for step in range(steps):
                made: list[Sequence] = []
                mean = 0.0
                for group in await asyncio.gather(
                    *(
                        attempts(engine, tokenizer, row["user_prompt"], f"{step}.{at}")
                        for at, row in enumerate(rng.sample(rows, GROUPS))
                    )
                ):
                    mean += fmean(reward for _, reward in group) / GROUPS
                    made += _credited(group)
                rewards.append(mean)
                if made:
                    done = learner.compute(learner.pack(made, rollouts=GROUPS * ROLLOUTS))
                    gaps.append(done.metrics.logprob_gap)
                    await engine.swap(step + 1, learner.apply)
                    shares.append(learner.served_share)
            return rewards, fmean(shares or [1.0]), fmean(gaps or [0.0])
    finally:
        await engine.close()


def _exact(folder: Path, variant: str) -> Mapping[str, Tensor] | None:
    if variant in ("float32", "nearest"):
        return None
    read = read_weights(folder)
    return {name: value.bfloat16() for name, value in read.items()} if variant == "published" else read


@contextmanager
def _rounding(variant: str) -> Generator[None]:
    def nearest(values: Tensor, **_: int) -> Tensor:
        return values.bfloat16().float()

    with patch.object(precision, "round_to_bfloat16", nearest if variant == "nearest" else precision.round_to_bfloat16):
        yield


async def attempts(engine: EmbeddedEngine, tokenizer: Any, question: str, name: str) -> list[tuple[Sequence, float]]:
    prompt: list[int] = tokenizer.apply_chat_template(_messages(question), add_generation_prompt=True, return_dict=False)
    return await asyncio.gather(*(_attempt(engine, tokenizer, prompt, question, f"{name}.{at}") for at in range(ROLLOUTS)))


async def _attempt(engine: EmbeddedEngine, tokenizer: Any, prompt: list[int], question: str, name: str) -> tuple[Sequence, float]:
    ids, logprobs = list[int](), list[float]()
    async for chunk in engine.generate(prompt, Sampling(temperature=1.0, max_tokens=REPLY)):
        ids += chunk.ids
        logprobs += chunk.logprobs
    made = Sequence(
        rollout_id=name,
        group_id=name.rpartition(".")[0],
        token_ids=tuple(prompt + ids),
        trained=(False,) * len(prompt) + (True,) * len(ids),
        logprobs=(0.0,) * len(prompt) + tuple(logprobs),
        temperatures=(1.0,) * (len(prompt) + len(ids)),
        advantages=(0.0,) * (len(prompt) + len(ids)),
        weight=1.0 / len(ids),
    )
    return made, is_call(tokenizer.decode(ids, skip_special_tokens=True), *map(int, re.findall(r"\d+", question)))


def _credited(group: list[tuple[Sequence, float]]) -> list[Sequence]:
    """Without the group if all of its rewards are equal."""
    rewards = [reward for _, reward in group]
    if not (spread := pstdev(rewards)):
        return []
    centre = fmean(rewards)
    return [
        replace(one, advantages=tuple((reward - centre) / spread if flag else 0.0 for flag in one.trained)) for one, reward in group
    ]


def _messages(question: str) -> list[dict[str, str]]:
    shown = [message for a, b in ((7, 8), (23, 41)) for message in (_user(f"What is {a} times {b}?"), _call(a, b))]
    system = {"role": "system", "content": "Answer every question with one call of the tool multiply(a, b)."}
    return [system, *shown, _user(question)]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _call(a: int, b: int) -> dict[str, str]:
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    return {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), variants=sys.argv[4:] or VARIANTS)
