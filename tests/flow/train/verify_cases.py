"""A recorded run without agent or gateway: the embedded engine samples conversations under two policy versions."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from training_cases import SHAPE, make_decoder, random_tree, section

from penstock.codec import context_digest
from penstock.config import EngineSection, RunConfig
from penstock.engines.base import Engine
from penstock.engines.embedded.decoder import read_weights, save_decoder
from penstock.engines.embedded.engine import open_engine
from penstock.pool.base import Pool
from penstock.pool.rows import column_names, encode_row
from penstock.pool.sqlite import SqlitePool
from penstock.records import End, Grade, Node, PolicyVersion, Sampling, Step, Task, make_rollout
from penstock.train import checkpoints
from penstock.train.batches import pack
from penstock.train.learner import Learner

TASK = Task(id="t", prompt=({"role": "user", "content": "?"},))
KINDS = (
    Sampling(max_tokens=6),
    Sampling(max_tokens=6, temperature=0.7),
    Sampling(max_tokens=6, top_k=5),
    Sampling(temperature=0, max_tokens=6),
)
"""One per rollout of a group."""


def make_run(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Path:
    """Groups 0 and 1 sampled by the start policy, group 2 by version 1, which is a checkpoint; returns the run folder."""
    model, run = folder / "model", folder / "run"
    _write_model(model)
    run.mkdir()
    tree = {"run": {"name": "small"}, "model": {"name": str(model)}, "dataset": {"train": "tasks.jsonl"}}
    if dtype == "bfloat16":
        tree["engine"] = {"dtype": dtype}
    config = RunConfig.model_validate(tree).model_dump(mode="json")
    (run / "config.json").write_text(json.dumps({"config": config, "datasets": {}}))
    asyncio.run(_sample(model, run, dtype))
    return run


def alter(run: Path, rollout_id: str, index: int, change: Callable[[Step], Step]) -> None:
    """Rewrite one stored step behind the pool's back, with a checksum that fits."""
    [step] = [step for step in asyncio.run(_steps(run, rollout_id)) if step.index == index]
    row = encode_row(change(step), "a step")
    names = ", ".join(f"{name} = ?" for name in column_names(Step))
    with closing(sqlite3.connect(run / "pool.db")) as database, database:
        changed = database.execute(
            f"UPDATE steps SET {names} WHERE rollout_id = ? AND id = ?", (row.record, *row.columns, row.crc, rollout_id, index)
        )
        assert changed.rowcount == 1


async def add_group(pool: Pool, engine: Engine, seq: int) -> None:
    """A group of one conversation per kind of sampling, each with two replies to its second prompt."""
    rollouts = [make_rollout(f"train-{seq}", TASK.id, place) for place in range(len(KINDS))]
    await pool.open_group(TASK, rollouts, seq=seq)
    for rollout, sampling in zip(rollouts, KINDS, strict=True):
        root = Node(rollout_id=rollout.id, id=0, parent=None, token_ids=(1, 2, 3 + seq), messages_digest="a", messages=TASK.prompt)
        first = await _reply(engine, root, sampling, index=0, before=())
        await pool.append(first, root)
        seen = root.token_ids + first.completion_ids
        more = Node(rollout_id=rollout.id, id=1, parent=0, token_ids=(7, 8), messages_digest="b", messages=(), reason=None)
        await pool.append(await _reply(engine, more, sampling, index=1, before=seen), more)
        await pool.append(await _reply(engine, more, sampling, index=2, before=seen), None)
        await pool.grade(Grade(rollout_id=rollout.id, reward=float(rollout.place), source="test"))
        await pool.end(rollout.id, End.COMPLETED)


def _write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": SHAPE.vocab_size,
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.inner,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "max_position_embeddings": SHAPE.context_length,
        "rms_norm_eps": SHAPE.norm_eps,
        "rope_theta": SHAPE.rope_theta,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_decoder(make_decoder().float(), folder)


async def _sample(model: Path, run: Path, dtype: Literal["float32", "bfloat16"]) -> None:
    engine = open_engine(model, name="small", section=EngineSection(device="cpu", dtype=dtype), seed=0)
    learner = Learner(engine.decoder, section(lr=1e-2, grad_clip=1.0), exact=read_weights(model))
    await engine.swap(0, learner.publish)
    pool = SqlitePool(run)
    try:
        await add_group(pool, engine, 0)
        await add_group(pool, engine, 1)
        learner.compute(pack(random_tree(0), rollouts=8, tokens_per_pass=60))
        await engine.swap(1, learner.apply)
        checkpoints.save(run / "checkpoints", PolicyVersion(number=1, step=1), learner, model)
        await add_group(pool, engine, 2)
    finally:
        await engine.close()
        await pool.close()


async def _reply(engine: Engine, node: Node, sampling: Sampling, *, index: int, before: tuple[int, ...]) -> Step:
    prompt = before + node.token_ids
    step = Step(
        rollout_id=node.rollout_id,
        index=index,
        node=node.id,
        transcript="main",
        completion_ids=(),
        logprobs=(),
        full_logprobs=(),
        versions=(),
        sampling=sampling,
        finish="stop",
        message={"role": "assistant", "content": ""},
        messages_digest=f"c{index}",
    )
    async for part in engine.generate(prompt, sampling):
        step = replace(
            step,
            completion_ids=step.completion_ids + part.ids,
            logprobs=step.logprobs + part.logprobs,
            full_logprobs=(step.full_logprobs or ()) + part.full_logprobs,
            versions=step.versions + part.versions,
            kept=step.kept + part.kept,
            finish=part.finish or "stop",
        )
    same = step.full_logprobs == step.logprobs
    return replace(
        step, full_logprobs=None if same else step.full_logprobs, context_digest=context_digest(prompt + step.completion_ids)
    )


async def _steps(run: Path, rollout_id: str) -> tuple[Step, ...]:
    pool = SqlitePool(run)
    try:
        return (await pool.rollout(rollout_id)).steps
    finally:
        await pool.close()
