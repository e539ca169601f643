"""An agent that multiplies with a tool, on a plain `openai` client. It runs on Penstock and on the Osmosis platform as it is."""

import json
import os
import re
from typing import Any

import uvicorn
from openai import AsyncOpenAI

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    Grader,
    GraderContext,
    LocalBackend,
    RolloutSample,
    create_rollout_server,
    get_rollout_context,
)
from osmosis_ai.rollout.context import SampleSource

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


EXAMPLES = [*worked(7, 8), *worked(23, 41)]


class Conversation(SampleSource):
    """What the grader gets to see."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages

    async def get_sample(self, name: str) -> RolloutSample:
        return RolloutSample(id=name, messages=self.messages)


class MultiplyConfig(AgentWorkflowConfig):
    name: str = "multiply"
    max_tokens: int = 256


multiply_config = MultiplyConfig()


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    """Two turns; a call that cannot be carried out ends the rollout, and the grader gives it nothing."""

    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        config, rollout = ctx.config or multiply_config, get_rollout_context()
        messages: list[Any] = [*EXAMPLES, *ctx.prompt]
        rollout.register_sample_source("main", Conversation(messages))
        async with AsyncOpenAI(
            base_url=rollout.chat_completions_url,
            api_key=rollout.api_key or "none",
            default_headers={"x-rollout-id": rollout.rollout_id, "x-sample-id": "main"},
        ) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="osmosis-rollout", messages=messages, tools=[MULTIPLY], max_tokens=config.max_tokens
                )
                reply = answer.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                results = [(call.id, product(call)) for call in reply.tool_calls or []]
                if not results or any(result is None for _, result in results):
                    return
                messages += [{"role": "tool", "tool_call_id": name, "content": str(result)} for name, result in results]


def product(call: Any) -> int | None:
    """What the tool gives; None for another tool or arguments that it does not take."""
    try:
        arguments = json.loads(call.function.arguments) if call.function.name == "multiply" else {}
        a, b = arguments["a"], arguments["b"]
    except (ValueError, TypeError, KeyError):
        return None
    return a * b if type(a) is int and type(b) is int else None


class MultiplyGrader(Grader):
    """1 where the last number of the final answer is right and the tool was used, else 0."""

    async def grade(self, ctx: GraderContext) -> None:
        for name, sample in ctx.samples.items():
            before, last = sample.messages[-2:]
            numbers = re.findall(r"-?\d+", str(last.get("content") or "").replace(",", ""))
            right = last["role"] == "assistant" and bool(numbers) and numbers[-1] == ctx.label
            ctx.set_sample_reward(name, 1.0 if right and before["role"] == "tool" else 0.0)


def main() -> None:
    backend = LocalBackend(workflow=MultiplyWorkflow, workflow_config=multiply_config, grader=MultiplyGrader)
    app = create_rollout_server(backend=backend)
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")))


if __name__ == "__main__":
    main()
