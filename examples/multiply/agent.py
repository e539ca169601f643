"""An agent that multiplies with a tool: the model calls `multiply`, is told the product, and answers with the number."""

import json
import re
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


def worked(a: int, b: int) -> list[dict[str, Any]]:
    """A whole exchange as the agent should have it: question, call, result, answer."""
    call = {"id": f"call_{a}_{b}", "type": "function", "function": {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}}
    return [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


# The same for every task and before its question, so that an engine computes them once. One would not do: a small model
# then copies the answer instead of making the call, and with no success at all there is nothing to learn from.
EXAMPLES = [*worked(7, 8), *worked(23, 41)]


class MultiplyConfig(AgentWorkflowConfig):
    """`[workflow]` in train.toml sets these."""

    name: str = "multiply"
    max_tokens: int = 40
    show_examples: bool = True


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    """Two turns; a call that cannot be carried out ends the rollout, and the grader gives it nothing."""

    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        config = ctx.config or MultiplyConfig()
        client = ctx.openai()
        messages: list[Any] = [*(EXAMPLES if config.show_examples else []), *ctx.prompt]
        tools: list[Any] = [MULTIPLY]
        asked = await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=config.max_tokens)
        reply = asked.choices[0].message
        results = [(call.id, product(call)) for call in reply.tool_calls or []]
        if not results or any(result is None for _, result in results):
            return
        messages.append(reply.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": name, "content": str(result)} for name, result in results]
        await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=config.max_tokens)


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


class MultiplyGrader(Grader):
    """1 where the last number of the final answer is right and the tool was used, else 0.

    It reads the transcript as the gateway recorded it, which looks the same whatever framework the agent is written in.
    """

    async def grade(self, ctx: GraderContext) -> None:
        *_, before, last = ctx.sample.transcript
        numbers = re.findall(r"-?\d+(?:\.\d+)?", (last.get("content") or "").replace(",", ""))
        used_the_tool = before["role"] == "tool"
        right = bool(numbers) and float(numbers[-1]) == float(ctx.label or "nan")
        ctx.set_reward(1.0 if used_the_tool and right else 0.0)
