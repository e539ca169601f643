"""The multiply agent in the form of Claw-R1: a black-box flow around an agent that knows a `base_url`, and nothing of training."""

import json
from typing import Any

from openai import AsyncOpenAI

from claw_r1.agent_flow.agent_flow import register
from claw_r1.blackbox_agent.blackbox_agent_flow import BlackBoxAgentFlowBase

TOOL: Any = {
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


class MultiplyAgent:
    """Asks, runs the tool that the model calls, and asks once more."""

    def __init__(self, base_url: str) -> None:
        self.client = AsyncOpenAI(base_url=base_url, api_key="not-needed")

    async def solve(self, messages: list[Any]) -> int:
        """How many turns it took; a call that cannot be carried out ends it after the first."""
        async with self.client as client:
            asked = await client.chat.completions.create(model="default", messages=messages, tools=[TOOL])
            reply = asked.choices[0].message
            results = [(call.id, product(call)) for call in reply.tool_calls or []]
            if not results or any(result is None for _, result in results):
                return 1
            messages = [*messages, reply.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": name, "content": str(result)} for name, result in results]
            await client.chat.completions.create(model="default", messages=messages, tools=[TOOL])
            return 2


def product(call: Any) -> int | None:
    """What the tool gives; None for another tool or arguments that it does not take."""
    if call.type != "function" or call.function.name != "multiply":
        return None
    try:
        arguments = json.loads(call.function.arguments)
        a, b = arguments["a"], arguments["b"]
    except (ValueError, TypeError, KeyError):
        return None
    return a * b if type(a) is int and type(b) is int else None


@register("multiply")
class MultiplyFlow(BlackBoxAgentFlowBase):
    """What training sees of the agent."""

    async def _run_agent(self, base_url: str, kwargs: dict[str, Any]) -> int:
        return await MultiplyAgent(base_url).solve(kwargs["raw_prompt"])


def compute_score(data_source: str | None, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 where the final answer is the product and came after the tool's, else 0."""
    *_, before, last = extra_info["messages"]
    return 1.0 if before["role"] == "tool" and (last.get("content") or "").strip() == ground_truth else 0.0
