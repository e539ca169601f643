"""The multiply agent on the OpenAI Agents SDK, whose Runner runs the tool and makes the second call by itself."""

import json
from contextlib import suppress
from typing import Any

from agents import MaxTurnsExceeded, ModelBehaviorError, ModelSettings, Runner, function_tool

from penstock import AgentWorkflow, AgentWorkflowContext
from penstock.integrations.openai_agents import RolloutAgent, RolloutModel, RolloutSession

from .agent import MultiplyConfig, MultiplyGrader

__all__ = ["MultiplyGrader", "OpenAIMultiply"]


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def worked(a: int, b: int) -> list[Any]:
    """A whole exchange in the items of this SDK: question, call, result, answer."""
    call = f"call_{a}_{b}"
    return [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"type": "function_call", "call_id": call, "name": "multiply", "arguments": json.dumps({"a": a, "b": b})},
        {"type": "function_call_output", "call_id": call, "output": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


EXAMPLES = [*worked(7, 8), *worked(23, 41)]


class OpenAIMultiply(AgentWorkflow[MultiplyConfig]):
    """Two turns at most. A call of a tool that is not there, or one turn too many, ends the rollout, and the grader gives 0."""

    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        config = ctx.config or MultiplyConfig()
        agent = RolloutAgent(
            name="multiply",
            model=RolloutModel(),
            model_settings=ModelSettings(max_tokens=config.max_tokens),
            tools=[multiply],
        )
        prompt: list[Any] = [*(EXAMPLES if config.show_examples else []), *ctx.prompt]
        with suppress(MaxTurnsExceeded, ModelBehaviorError):
            await Runner.run(agent, prompt, session=RolloutSession(name="multiply"), max_turns=2)
