"""A run whose engine is a fleet of servers: they get the start policy first, then every version; a resumed run begins with its."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from faults.upstream_cases import FakeVllm
from penstock.config import load_config
from penstock.errors import ConfigError
from penstock.models import resolve
from penstock.run.inputs import read_inputs
from penstock.train.trainer import Summary, train

TINY = Path(__file__).parents[2] / "helpers" / "tiny_run"
AGENT = """
from penstock import AgentWorkflow, Grader

class Ask(AgentWorkflow):
    async def run(self, ctx):
        await ctx.openai().chat.completions.create(model="policy", messages=list(ctx.prompt))

class Chance(Grader):
    async def grade(self, ctx):
        ctx.set_reward(sum(map(ord, ctx.sample.messages[-1]["content"])) % 5)
"""
"""Its rewards differ, whatever is sampled."""


def silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""


async def trained(folder: Path, *servers: FakeVllm, steps: int) -> Summary:
    """Train the tiny policy, or continue with it."""
    urls = json.dumps([server.url for server in servers])
    settings = [f'run.folder="{folder}"', f"train.steps={steps}", "sampling.max_tokens=8", "train.checkpoint_every=1"]
    text = (TINY / "train.toml").read_text().replace("slots = 32", f'name = "vllm"\nurl = {urls}')
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text((TINY / "tasks.jsonl").read_text())
    (folder / "train.toml").write_text(text)
    config = load_config(folder / "train.toml", settings)
    inputs = await asyncio.to_thread(read_inputs, config, silent)
    async with asyncio.timeout(120):
        return await train(config, inputs, listener=silent, stop=asyncio.Event())


def tiny_server() -> FakeVllm:
    config = json.loads((resolve("tiny").path / "config.json").read_text())
    server = FakeVllm(context=config["max_position_embeddings"])
    server.vocabulary = config["vocab_size"]
    return server


def test_every_version_reaches_servers_and_resumed_run_begins_with_last(tmp_path: Path):
    async def case() -> None:
        async with tiny_server() as one, tiny_server() as other:
            assert (await trained(tmp_path, one, other, steps=1)).steps == 1
            assert (one.held, other.held) == (1, 1)
            assert [server.calls.count("collective_rpc") for server in (one, other)] == [2, 2]
        async with tiny_server() as fresh:
            assert (await trained(tmp_path, fresh, steps=2)).steps == 2
            assert (fresh.held, fresh.calls.count("collective_rpc")) == (2, 2)

    asyncio.run(case())


def test_servers_that_cannot_take_weights_end_run_with_remedy(tmp_path: Path):
    async def case() -> None:
        async with tiny_server() as server:
            server.refuses = True
            with pytest.raises(Exception, match="VLLM_SERVER_DEV_MODE=1"):
                await trained(tmp_path, server, steps=1)

    asyncio.run(case())


def test_servers_that_are_not_there_leave_no_run_folder(tmp_path: Path):
    async def case() -> None:
        server = tiny_server()
        async with server:
            pass
        with pytest.raises(ConfigError, match="vLLM"):
            await trained(tmp_path, server, steps=1)
        assert not (tmp_path / "tiny").exists()

    asyncio.run(case())
