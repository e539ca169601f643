"""A team of two policies: the planner chooses the tool call, the executor reads the tool's result and answers.

Each is asked by its model name, and nothing else in this file says that they are trained: any OpenAI-style client would do.
"""

import json
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, Grader, GraderContext

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class TeamConfig(AgentWorkflowConfig):
    """`[workflow]` in train.toml sets these."""

    name: str = "team"
    max_tokens: int = 30


class Team(AgentWorkflow[TeamConfig]):
    async def run(self, ctx: AgentWorkflowContext[TeamConfig]) -> None:
        limit, client = (ctx.config or TeamConfig()).max_tokens, ctx.openai()
        messages, tools = list[Any](ctx.prompt), list[Any]([MULTIPLY])
        planned = await client.chat.completions.create(model="planner", messages=messages, tools=tools, max_tokens=limit)
        plan = planned.choices[0].message
        if not plan.tool_calls:
            return
        messages.append(plan.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": product(call)} for call in plan.tool_calls]
        await client.chat.completions.create(model="executor", messages=messages, tools=tools, max_tokens=limit)


def product(call: Any) -> str:
    """What the tool says; a call that it cannot carry out is refused."""
    try:
        arguments = json.loads(call.function.arguments)
        a, b = arguments["a"], arguments["b"]
    except (ValueError, TypeError, KeyError):
        return "no"
    return str(a * b) if call.function.name == "multiply" and type(a) is int and type(b) is int else "no"


class TeamGrader(Grader):
    """Rewards each for its own part: the planner for a call that gives the right number, the executor for repeating the result.

    The rollout's own reward, which curves and summaries show, is for the right answer at the end.
    """

    async def grade(self, ctx: GraderContext) -> None:
        results, answer = list[str](), ""
        if executor := ctx.samples.get("executor"):
            results = [message["content"] for message in executor.transcript if message["role"] == "tool"]
            answer = (executor.transcript[-1].get("content") or "").strip()
            ctx.set_sample_reward("executor", float(answer in results))
        if "planner" in ctx.samples:
            ctx.set_sample_reward("planner", float(results == [ctx.label]))
        ctx.set_reward(float(answer == ctx.label))
