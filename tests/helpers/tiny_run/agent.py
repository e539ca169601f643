"""The tiny policy's agent: a call as text, the tool's result, the answer."""

import json
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext
from penstock.models.tiny import tiny_result, tiny_reward, tiny_tool


class TinyWorkflow(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        client, messages = ctx.openai(), list[Any](ctx.prompt)
        said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content or ""
        try:
            call = json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            result = tiny_tool(call["name"], call["arguments"])
        except (ValueError, TypeError, KeyError):
            return
        messages += [{"role": "assistant", "content": said}, tiny_result(result)]
        await client.chat.completions.create(model="policy", messages=messages)


class TinyGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        messages = ctx.sample.messages
        a, b = messages[0]["content"].split("*")
        ctx.set_reward(tiny_reward(messages[-1]["content"], int(a), int(b)) if len(messages) == 4 else 0.0)
