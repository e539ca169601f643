"""The Node.js example, from its TOML to graded rollouts: the program, its npm package and what runs it are the real ones."""

import asyncio
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from client_record import assert_trainable, only_path, view
from client_trial import needs
from environments import ROOT, npm_prefix
from scripts import call, last_turn

from penstock.chat.renderer import Renderer
from penstock.config import RunConfig, load_config
from penstock.events import Events
from penstock.records import End, Rollout, Sampling
from penstock.rollout.runner import open_runner
from penstock.rollout.scheduler import run_once
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import open_agent
from penstock.testing import ScriptedEngine, workbench, write_tokenizer

QUESTION = re.compile(r"What is (\d+) times (\d+)\?")
DEADLINE_S = 200


def multiplier(prompt: str) -> str:
    """Calls the tool for the last question, and then says what it received."""
    turn = last_turn(prompt)
    if results := re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn):
        return results[-1]
    a, b = QUESTION.findall(prompt)[-1]
    return call("multiply", a=int(a), b=int(b))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Of a copy of the example whose packages are those that `make test-clients` has installed."""
    needs("npm")
    shutil.copytree(ROOT / "examples/node", tmp_path / "node", ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "node" / "node_modules").symlink_to(npm_prefix() / "node_modules")
    (tmp_path / "multiply").symlink_to(ROOT / "examples/multiply")
    return load_config(tmp_path / "node" / "train.toml", ["workflow.max_tokens=200"])  # every byte is a token here


async def attempts(config: RunConfig, script, executor: str, count: int) -> list[Rollout]:
    renderer = Renderer.load(write_tokenizer(config.agent.folder / "model"))
    core, agent = renderer.tokenizer.core, open_agent(config.agent, config.workflow, config.grader)
    engine = ScriptedEngine(lambda ids: script(core.decode(ids, skip_special_tokens=False)), renderer.tokenizer, chunk=8)
    limits = config.rollout.model_copy(update={"executor": executor, "concurrency": 2})
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        bench = await stack.enter_async_context(workbench(engine, renderer, serves=True))
        opened = open_runner(agent, gateway=bench.gateway, pool=bench.pool, events=Events(), limits=limits)
        runner = await stack.enter_async_context(opened)
        tasks = load_tasks(config.dataset.train, limit=count)
        names = await run_once(tasks, runner, pool=bench.pool, sampling=Sampling(max_tokens=400), limits=limits)
        return [await bench.pool.rollout(name) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "process"])
def test_node_agent_uses_its_tool_and_is_trainable(config: RunConfig, executor: str) -> None:
    done = asyncio.run(attempts(config, multiplier, executor, 4))
    assert [(attempt.end, attempt.message, attempt.reward, len(attempt.steps)) for attempt in done] == [
        (End.COMPLETED, "", 1.0, 2)
    ] * 4
    for attempt in done:
        *_, question, made, reported, answer = view(attempt, only_path(attempt))
        assert (question[0], reported[0], reported[1]) == ("user", "tool", answer[1])
        assert made[2][0][0] == "multiply"
        assert_trainable(attempt)


@pytest.mark.slow
@pytest.mark.parametrize(
    "said", ["870", call("divide", a=1, b=2), call("multiply", a="1", b=2), "<tool_call>\n{oh\n</tool_call>", ""]
)
def test_mistakes_of_policy_end_rollout_well_and_earn_nothing(config: RunConfig, said: str) -> None:
    [attempt] = asyncio.run(attempts(config, lambda _: said, "inline", 1))
    assert (attempt.end, attempt.reward, len(attempt.steps)) == (End.COMPLETED, 0.0, 1), attempt.message


@pytest.mark.slow
def test_crash_of_the_program_is_reported_by_its_exit_code(config: RunConfig) -> None:
    (config.agent.folder / "agent.mjs").write_text("throw new Error('the agent broke');\n")
    [attempt] = asyncio.run(attempts(config, multiplier, "inline", 1))
    assert attempt.end is End.AGENT_ERROR and "node ended with exit code 1: Error: the agent broke" in attempt.message
