"""For tests of flows: a project folder with flows in it, and its rollouts run on a real gateway over a scripted engine."""

import asyncio
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gateway_cases import renderer

from penstock.config import AgentSection, RolloutSection
from penstock.events import Events
from penstock.records import Sampling, Task, make_rollout
from penstock.rollout.executors.base import read_section
from penstock.rollout.runner import open_runner
from penstock.sdk.discovery import open_agent
from penstock.testing import ScriptedEngine, workbench
from penstock_compat.flows.table import REGISTERED

DEADLINE_S = 60
ASK = {"role": "user", "content": "What is 6 times 7?"}
SAMPLING = Sampling(max_tokens=200, temperature=0.8)
HEAD = """
from types import MappingProxyType
from penstock import Grader
from penstock_compat.flow import (
    AgentFlowBase, BlackBoxAgentFlowBase, MultiStepAgentFlow, SingleStepSingleTurnAgentFlow, SubmittedStep as Step, register
)
"""


class Ran(NamedTuple):
    """One rollout that has ended, and what the engine saw of it."""

    attempt: object
    engine: ScriptedEngine

    @property
    def prompts(self):
        return [self.engine.tokenizer.decode(ids) for ids in self.engine.prompts]


def make_task(prompt=(ASK,), label="42", **columns):
    return Task(id="t", prompt=tuple(prompt), label=label, metadata={"data_source": "openai/gsm8k", **columns})


@contextlib.contextmanager
def project(folder, text="", **section):
    """The agent of a project folder; what it registers and makes importable is undone."""
    path, known = list(sys.path), dict(REGISTERED)
    if text:
        (Path(folder) / "agent.py").write_text(HEAD + text)
    try:
        yield open_agent(AgentSection(entry=Path(folder) / "agent.py", **section), {}, {})
    finally:
        sys.path[:] = path
        REGISTERED.clear()
        REGISTERED.update(known)


def ran(agent, replies, *, task=None, channel="train", executor="inline", sampling=SAMPLING, **settings):
    """Run one rollout of `agent` to its end; the engine says `replies` in turn."""

    async def main():
        task_ = task or make_task()
        engine = ScriptedEngine(replies, renderer().tokenizer)
        rollout = make_rollout(f"{channel}-0", task_.id, 0, channel=channel)
        async with asyncio.timeout(DEADLINE_S), workbench(engine, renderer(), serves=True) as bench:
            await bench.pool.open_group(task_, [rollout], seq=0)
            limits = RolloutSection(executor=executor)
            options = {"events": Events(), "limits": limits, "section": read_section(executor, settings)}
            async with open_runner(agent, gateway=bench.gateway, pool=bench.pool, **options) as runner:
                bench.gateway.reward_function = runner.compute_reward
                await runner.run(rollout, task_, replace(sampling))
            return Ran(await bench.pool.rollout(rollout.id), engine)

    return asyncio.run(main())
