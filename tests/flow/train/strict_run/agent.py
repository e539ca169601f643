"""An agent whose one call must fill the schema of a strict tool; the reward is for the right values."""

import json
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "kind": {"enum": ["sum", "product"]}},
    "required": ["a", "b", "kind"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "multiply", "strict": True, "parameters": SCHEMA}}


class StrictWorkflow(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        asked: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "multiply"}}}
        await ctx.openai().chat.completions.create(model="policy", messages=list[Any](ctx.prompt), **asked)


class FilledGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        messages = ctx.sample.messages
        a, b = map(int, messages[0]["content"].split("*"))
        calls = messages[-1].get("tool_calls") or []
        try:
            filled = json.loads(calls[0]["function"]["arguments"])
        except (IndexError, ValueError):
            ctx.set_reward(0.0)
            return
        right = (filled["a"] == a, filled["b"] == b, filled["kind"] == "product")
        ctx.set_reward(sum(right) / 3)
