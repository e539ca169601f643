"""An agent that multiplies with a tool, on the OpenAI Agents SDK. It runs on Penstock and on the Osmosis platform as it is."""

import json
import os
import re
from contextlib import suppress
from typing import Any

import uvicorn
from agents import MaxTurnsExceeded, ModelBehaviorError, ModelSettings, Runner, function_tool

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    Grader,
    GraderContext,
    LocalBackend,
    create_rollout_server,
)
from osmosis_ai.rollout.integrations.agents.openai_agents import OsmosisAgent, OsmosisMemorySession, OsmosisRolloutModel


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


class MultiplyConfig(AgentWorkflowConfig):
    name: str = "multiply"
    max_tokens: int = 256


multiply_config = MultiplyConfig()


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    """Two turns at most. A call of a tool that is not there, or one turn too many, ends the rollout, and the grader gives 0."""

    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        config = ctx.config or multiply_config
        agent = OsmosisAgent(
            name="multiply",
            model=OsmosisRolloutModel(),
            model_settings=ModelSettings(max_tokens=config.max_tokens),
            tools=[multiply],
        )
        with suppress(MaxTurnsExceeded, ModelBehaviorError):
            await Runner.run(agent, [*EXAMPLES, *ctx.prompt], session=OsmosisMemorySession(name="multiply"), max_turns=2)


class MultiplyGrader(Grader):
    """1 where the last number of the final answer is right and the tool was used, else 0."""

    async def grade(self, ctx: GraderContext) -> None:
        for name, sample in ctx.samples.items():
            before, last = sample.messages[-2:]
            text = "".join(block.get("text", "") for block in last.get("content") or [] if isinstance(block, dict))
            numbers = re.findall(r"-?\d+", text.replace(",", ""))
            right = last.get("role") == "assistant" and bool(numbers) and numbers[-1] == ctx.label
            ctx.set_sample_reward(name, 1.0 if right and before.get("type") == "function_call_output" else 0.0)


def main() -> None:
    backend = LocalBackend(workflow=MultiplyWorkflow, workflow_config=multiply_config, grader=MultiplyGrader)
    app = create_rollout_server(backend=backend)
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")))


if __name__ == "__main__":
    main()
