"""An agent that multiplies with a tool, on Strands. It runs on Penstock and on the Osmosis platform as it is."""

import os
import re
from contextlib import suppress
from typing import Any

import uvicorn
from strands import tool
from strands.types.exceptions import MaxTokensReachedException

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    Grader,
    GraderContext,
    LocalBackend,
    create_rollout_server,
)
from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent


@tool(name="multiply")
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


def worked(a: int, b: int) -> list[dict[str, Any]]:
    """A whole exchange in the blocks of this framework: question, call, result, answer."""
    call, product = f"call_{a}_{b}", str(a * b)
    return [
        {"role": "user", "content": [{"text": f"What is {a} times {b}?"}]},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": call, "name": "multiply", "input": {"a": a, "b": b}}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": call, "status": "success", "content": [{"text": product}]}}]},
        {"role": "assistant", "content": [{"text": product}]},
    ]


EXAMPLES = [*worked(7, 8), *worked(23, 41)]


class MultiplyConfig(AgentWorkflowConfig):
    name: str = "multiply"
    max_tokens: int = 256


multiply_config = MultiplyConfig()


class MultiplyWorkflow(AgentWorkflow[MultiplyConfig]):
    """Strands runs the tool and makes the second call by itself; a reply that is cut off ends the rollout."""

    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        config = ctx.config or multiply_config
        agent = OsmosisStrandsAgent(
            name="multiply",
            model=OsmosisRolloutModel(params={"max_tokens": config.max_tokens}),
            messages=[*EXAMPLES, *ctx.prompt],
            tools=[multiply],
            callback_handler=None,
        )
        with suppress(MaxTokensReachedException):
            await agent.invoke_async()


class MultiplyGrader(Grader):
    """1 where the last number of the final answer is right and the tool was used, else 0."""

    async def grade(self, ctx: GraderContext) -> None:
        for name, sample in ctx.samples.items():
            before, last = sample.messages[-2:]
            numbers = re.findall(r"-?\d+", " ".join(block.get("text", "") for block in last["content"]).replace(",", ""))
            used_the_tool = any("toolResult" in block for block in before["content"])
            right = last["role"] == "assistant" and bool(numbers) and numbers[-1] == ctx.label
            ctx.set_sample_reward(name, 1.0 if right and used_the_tool else 0.0)


def main() -> None:
    backend = LocalBackend(workflow=MultiplyWorkflow, workflow_config=multiply_config, grader=MultiplyGrader)
    app = create_rollout_server(backend=backend)
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")))


if __name__ == "__main__":
    main()
