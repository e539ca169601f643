"""The tiny policy's agent with a tool that takes its time: how long is decided by the task and the place in its group."""

import asyncio
import json
import random
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext, get_rollout_context
from penstock.models.tiny import tiny_result, tiny_reward, tiny_tool

MEDIAN_S, SIGMA = 0.25, 1.2
"""Log-normal, as the times of tools and tests are: of 32 waits the longest is about ten times the middle one."""


def wait_s(rollout_id: str) -> float:
    """The same for every attempt at a place of a group, whatever the mode."""
    group, place, _ = rollout_id.split(".")
    return random.Random(f"{group}.{place}").lognormvariate(0.0, SIGMA) * MEDIAN_S


class Waiting(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        context = get_rollout_context()
        assert context is not None
        client, messages = ctx.openai(), list[Any](ctx.prompt)
        said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content or ""
        await asyncio.sleep(wait_s(context.rollout_id))
        try:
            call = json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            result = tiny_tool(call["name"], call["arguments"])
        except (ValueError, TypeError, KeyError):
            return
        messages += [{"role": "assistant", "content": said}, tiny_result(result)]
        await client.chat.completions.create(model="policy", messages=messages)


class Right(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        messages = ctx.sample.messages
        a, b = messages[0]["content"].split("*")
        ctx.set_reward(tiny_reward(messages[-1]["content"], int(a), int(b)) if len(messages) == 4 else 0.0)
