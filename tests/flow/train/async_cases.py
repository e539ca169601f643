"""A whole training run in this process, on an engine whose every token waits for the test's word where the test wants it to.

run = Watched(tmp_path, "rollout.max_staleness=2")
run.engine_waits = lambda rollout_id, place: …      # an awaitable before the token at that place of a reply, or None
summary = run.train()
"""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.chat.tokenizer import Tokenizer
from penstock.config import EngineSection, RunConfig, TrainSection, load_config
from penstock.engines.base import SampledChunk
from penstock.engines.embedded.decoder import Decoder, read_decoder_shape, save_decoder
from penstock.pool.sqlite import SqlitePool
from penstock.records import Rollout, Sampling
from penstock.run.inputs import read_inputs
from penstock.testing import ScriptedEngine, write_tokenizer
from penstock.train.losses.base import Loss, LossTokens
from penstock.train.losses.clip import clip
from penstock.train.trainer import Summary, train

HERE = Path(__file__).parent / "async_run"
DEADLINE_S = 180.0
CONFIG = """
[run]
name = "run"
[agent]
entry = "{agent}"
[dataset]
train = "tasks.jsonl"
eval = "heldout.jsonl"
[rollout]
group_size = 2
groups_per_step = 1
concurrency = 16
[sampling]
max_tokens = 16
[engine]
name = "async_cases:open_engine"
[train]
steps = 3
lr = 1e-3
"""

Waits = Callable[[str, int], Awaitable[object] | None]


class PacedEngine(ScriptedEngine):
    """Says the rollout's place, one token at a time, each as `waits` lets it; remembers what version each was sampled under."""

    waits: Waits
    says: Callable[[str, int], str]
    held: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]]
    """Of each reply: the versions of its tokens, by rollout and prompt."""
    changed: asyncio.Condition
    callers: list[str]
    """The rollout of every request, in order."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, rollout_id: str = ""
    ) -> AsyncGenerator[SampledChunk, None]:
        self.prompts.append(tuple(prompt_ids))
        self.samplings.append(replace(sampling, stop_ids=()))
        self.callers.append(rollout_id)
        ids = [*self.tokenizer.encode(self.says(rollout_id, self.version)), *self.tokenizer.eos_ids[:1]]
        versions: list[int] = []
        for place, token_id in enumerate(ids):
            if waits := self.waits(rollout_id, place):
                await waits
            versions.append(self.version)
            last = place + 1 == len(ids)
            if last:
                self.held.setdefault((rollout_id, tuple(prompt_ids)), []).append(tuple(versions))
            yield SampledChunk((token_id,), (-1.0,), (-1.0,), (versions[-1],), "stop" if last else None)
            async with self.changed:
                self.changed.notify_all()

    async def load(self, version: int, folder: Path) -> None:
        self.version = version
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a token or a new version brings about."""
        async with self.changed:
            await self.changed.wait_for(condition)

    def of_channel(self, channel: str) -> list[Sampling]:
        """How requests of a channel were to be sampled."""
        return [given for given, name in zip(self.samplings, self.callers, strict=True) if name.startswith(channel)]


class Watched:
    """A run, its engine and its events. `train` may be called again, to take it up."""

    current: "Watched"

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self._overrides = folder, overrides
        self.reported: list[tuple[str, dict[str, Any]]] = []
        self._seen: defaultdict[tuple[str, int | None], asyncio.Event] = defaultdict(asyncio.Event)
        self.stop_at: Callable[[str, dict[str, Any]], bool] = lambda kind, fields: False
        """When to ask it to stop."""
        self.engine: PacedEngine
        self.engine_waits: Waits = lambda rollout_id, place: None
        self.engine_says: Callable[[str, int], str] = lambda rollout_id, version: f"at {rollout_id.split('.')[1]}"
        """The replies of a rollout under a version."""
        self.loss_waits: Callable[[], None] = lambda: None
        """Called in the learner's thread, in the middle of an update."""
        if not (folder / "model").exists():
            _write_inputs(folder)

    def config(self) -> RunConfig:
        given = [f'run.folder="{self.folder / "runs"}"', f'model.name="{self.folder / "model"}"', *self._overrides]
        return load_config(self.folder / "run.toml", given)

    def train(self) -> Summary:
        Watched.current = self
        config, stop = self.config(), asyncio.Event()

        def listen(kind: str, fields: dict[str, Any]) -> None:
            self.reported.append((kind, fields))
            self._seen[kind, fields.get("step")].set()
            if self.stop_at(kind, fields):
                stop.set()

        async def training() -> Summary:
            async with asyncio.timeout(DEADLINE_S):
                return await train(config, read_inputs(config, listen), listener=listen, stop=stop)

        return asyncio.run(training())

    def seen(self, kind: str, step: int) -> Awaitable[object]:
        """Wait for an event of a step."""
        return self._seen[kind, step].wait()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [fields for shown, fields in self.reported if shown == kind]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "runs/run/metrics.jsonl").read_text().splitlines()]

    def attempts(self, channel: str = "train") -> list[Rollout]:
        async def read() -> list[Rollout]:
            pool = SqlitePool(self.folder / "runs/run")
            try:
                return [attempt for group in await pool.groups(channel) for attempt in group.rollouts]
            finally:
                await pool.close()

        return asyncio.run(read())


def open_engine(
    folder: Path, *, name: str, section: EngineSection, seed: int, decode: Callable[[Sequence[int]], str] | None = None
) -> PacedEngine:
    """Named by the config."""
    engine = Watched.current.engine = PacedEngine([], Tokenizer.load(folder), model=name)
    engine.waits, engine.held, engine.changed = Watched.current.engine_waits, {}, asyncio.Condition()
    engine.callers, engine.says = [], Watched.current.engine_says
    return engine


def watched_loss(tokens: LossTokens, section: TrainSection) -> Loss:
    """`clip`, after whatever the test waits for in the middle of an update."""
    assert threading.current_thread() is not threading.main_thread()
    Watched.current.loss_waits()
    return clip(tokens, section)


def _write_inputs(folder: Path) -> None:
    rows = [{"prompt": f"Number {n}", "label": str(n)} for n in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    (folder / "run.toml").write_text(CONFIG.format(agent=HERE / "agent.py"))
    write_tokenizer(folder / "model")
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 512}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes, **layers}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    torch.manual_seed(7)
    save_decoder(Decoder(read_decoder_shape(folder / "model")), folder / "model")
