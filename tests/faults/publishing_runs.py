"""Training runs that publish new weights in every step, on any engine, and the records they leave."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from penstock.config import load_config
from penstock.engines.embedded.decoder import Decoder, read_decoder_shape, save_decoder
from penstock.pool.sqlite import SqlitePool
from penstock.records import Rollout
from penstock.run.inputs import read_inputs
from penstock.testing import write_tokenizer
from penstock.train.trainer import Summary, train

HERE = Path(__file__).parent
DEADLINE_S = 120.0
SEVERAL = 4
"""Replies that a server is busy with when it is killed, at least."""
CONFIG = """
[run]
name = "run"
[agent]
entry = "{agent}"
[dataset]
train = "tasks.jsonl"
[rollout]
group_size = 4
groups_per_step = 2
concurrency = 24
max_staleness = 3
[sampling]
max_tokens = 24
[train]
lr = 1e-2
checkpoints_kept = 1000
"""


class Server:
    """A server in its own process, which reports every reply."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        assert process.stdout is not None
        self.url = process.stdout.readline().decode().strip()
        self.replying = 0
        """Replies that it has begun and not ended, when last heard of; after a kill, those that were cut off."""
        self._to_be_killed = threading.Event()
        self._ears = threading.Thread(target=self._hear, args=(process.stdout,))
        self._ears.start()

    def kill_soon(self) -> None:
        """Kill it as hard as can be, in the middle of replies."""
        self._to_be_killed.set()

    def close(self) -> None:
        """End it, if it lives."""
        self._process.kill()
        self._process.wait()
        self._ears.join()

    def _hear(self, said: IO[bytes]) -> None:
        with said:
            while word := said.read(1):
                self.replying += {b"+": 1, b"-": -1}[word]
                if self._to_be_killed.is_set() and self.replying >= SEVERAL:
                    os.kill(self._process.pid, signal.SIGKILL)
                    self._to_be_killed.clear()


@contextmanager
def weight_server(model: str) -> Iterator[Server]:
    command = [sys.executable, str(HERE / "weight_server.py"), model]
    server = Server(subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0))
    try:
        yield server
    finally:
        server.close()


class Run:
    """One run in this process, and what came of it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self._overrides = folder, overrides
        self.published: list[int] = []
        """Versions in the order in which they were served."""
        self._times: list[float] = []
        self.on_step: Callable[[int], None] = lambda step: None
        (folder / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Number {n}"}) + "\n" for n in range(20)))
        (folder / "run.toml").write_text(CONFIG.format(agent=HERE / "published_run" / "agent.py"))
        self.model = write_model(folder / "model")

    def train(self) -> Summary:
        os.environ["PENSTOCK_TEST_NOTES"] = str(self.folder / "notes.txt")
        given = [f'run.folder="{self.folder / "runs"}"', f'model.name="{self.model}"', *self._overrides]
        config = load_config(self.folder / "run.toml", given)

        def listen(kind: str, fields: dict[str, Any]) -> None:
            if kind == "train.step":
                self.published.append(fields["version"])
                self._times.append(time.monotonic())
                self.on_step(fields["step"])

        async def training() -> Summary:
            async with asyncio.timeout(DEADLINE_S):
                return await train(config, read_inputs(config, listen), listener=listen, stop=asyncio.Event())

        return asyncio.run(training())

    @property
    def per_s(self) -> float:
        """Publications."""
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])

    def notes(self, kind: str) -> list[list[str]]:
        """What the agents wrote down."""
        lines = [json.loads(line) for line in (self.folder / "notes.txt").read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == kind]

    def attempts(self) -> list[Rollout]:
        """All that was recorded, attempts that others took the place of included."""

        async def read() -> list[Rollout]:
            pool = SqlitePool(self.folder / "runs/run")
            try:
                groups = await pool.groups("train", limit=10_000)
                return [await pool.rollout(one.id) for group in groups for one in await pool.rollout_refs(group.id)]
            finally:
                await pool.close()

        return asyncio.run(read())

    def lost(self, attempts: list[Rollout]) -> list[str]:
        """Answers that an agent got and the pool does not have as the agent saw them."""
        kept = {(a.ref.id, f"chatcmpl-{step.answer}", step.message.get("content")) for a in attempts for step in a.steps}
        return [answer for rollout, answer, text in self.notes("answered") if (rollout, answer, text) not in kept]


def write_model(folder: Path) -> Path:
    """A random network small enough to train in milliseconds, in an ordinary model folder."""
    write_tokenizer(folder)
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 512}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes, **layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(7)
    decoder = Decoder(read_decoder_shape(folder))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.05)
    save_decoder(decoder, folder)
    return folder
