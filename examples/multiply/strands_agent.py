"""The multiply agent on Strands, which runs the tool and makes the second call by itself."""

import logging
from contextlib import suppress

from strands import tool  # pyright: ignore[reportUnknownVariableType]
from strands.types.exceptions import MaxTokensReachedException

from penstock import AgentWorkflow, AgentWorkflowContext
from penstock.integrations.strands import RolloutAgent, RolloutModel

from .agent import EXAMPLES, MultiplyConfig, MultiplyGrader

__all__ = ["MultiplyGrader", "StrandsMultiply"]

logging.getLogger("strands").setLevel(logging.CRITICAL)  # it warns of every wrong call, and a policy in training makes many


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


class StrandsMultiply(AgentWorkflow[MultiplyConfig]):
    """Two turns at most. What a wrong call gets from Strands is an error to read; a reply that is cut off ends the rollout."""

    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        config = ctx.config or MultiplyConfig()
        agent = RolloutAgent(
            name="multiply",
            model=RolloutModel(params={"max_tokens": config.max_tokens}),
            messages=[*(EXAMPLES if config.show_examples else []), *ctx.prompt],
            tools=[multiply],
            callback_handler=None,
        )
        with suppress(MaxTokensReachedException):
            await agent.invoke_async(limits={"turns": 2})
