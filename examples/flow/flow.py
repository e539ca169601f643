"""The multiply agent as a flow in the style of Claw-R1: an agent that knows a `base_url`, and the flow that training sees of it."""

import json
import re
from typing import Any

from openai import AsyncOpenAI

from penstock import Grader, GraderContext
from penstock_compat.flow import BlackBoxAgentFlowBase, register

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


def worked(a: int, b: int) -> list[dict[str, Any]]:
    """A whole exchange as the agent should have it: question, call, result, answer."""
    call = {"id": f"call_{a}_{b}", "type": "function", "function": {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}}
    return [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


EXAMPLES = [*worked(7, 8), *worked(23, 41)]
"""The same for every task, and before its question: an engine computes them once."""


class MultiplyAgent:
    """Asks, runs the tool that the model calls, and asks once more."""

    def __init__(self, base_url: str, max_tokens: int) -> None:
        self.client = AsyncOpenAI(base_url=base_url, api_key="not-needed")
        self.max_tokens = max_tokens

    async def solve(self, messages: list[Any]) -> int:
        """How many turns it took; a call that cannot be carried out ends it after the first."""
        async with self.client as client:
            reply = await self._ask(client, messages)
            calls: list[Any] = reply.tool_calls or []
            results = [(call.id, product(call)) for call in calls]
            if not results or any(result is None for _, result in results):
                return 1
            told = [{"role": "tool", "tool_call_id": name, "content": str(result)} for name, result in results]
            await self._ask(client, [*messages, reply.model_dump(exclude_none=True), *told])
            return 2

    async def _ask(self, client: AsyncOpenAI, messages: list[Any]) -> Any:
        tools: list[Any] = [TOOL]
        asked = await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=self.max_tokens)
        return asked.choices[0].message


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
    """What training sees of the agent. `self.config` is the table [workflow] of train.toml."""

    async def _run_agent(self, base_url: str, kwargs: dict[str, Any]) -> int:
        examples = EXAMPLES if self.config.get("show_examples", True) else []
        return await MultiplyAgent(base_url, self.config.get("max_tokens", 40)).solve([*examples, *kwargs["raw_prompt"]])


class ProductGrader(Grader):
    """1 where the tool was used and the last number of the final answer is the label, else 0."""

    async def grade(self, ctx: GraderContext) -> None:
        *_, before, last = ctx.sample.transcript
        numbers = re.findall(r"-?\d+(?:\.\d+)?", (last.get("content") or "").replace(",", ""))
        right = bool(numbers) and float(numbers[-1]) == float(ctx.label or "nan")
        ctx.set_reward(1.0 if before["role"] == "tool" and right else 0.0)
