"""Notes each run and each grading in a file; ends at once, or hangs, as its task says."""

import asyncio
import os
from pathlib import Path

from penstock import AgentWorkflow, AgentWorkflowConfig, ConcurrencyConfig, Grader, get_rollout_context

HERE = Path(os.environ["KILLED_SERVER"])
config = AgentWorkflowConfig(name="killed", concurrency=ConcurrencyConfig(max_concurrent=2))


async def go_on(word):
    """At once, or never."""
    if word == "hang":
        await asyncio.Event().wait()


def note(what):
    with (HERE / "notes").open("a") as file:
        file.write(f"{what}\n")


class Work(AgentWorkflow):
    async def run(self, ctx):
        note(f"ran {get_rollout_context().rollout_id}")
        await go_on(ctx.metadata["run"])
        return [*ctx.prompt, {"role": "assistant", "content": "6"}]


class Check(Grader):
    async def grade(self, ctx):
        note(f"graded {ctx.metadata['name']}")
        await go_on(ctx.metadata["grade"])
        ctx.set_sample_reward("main", 1.0)
