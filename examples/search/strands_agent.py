"""The search agent on Strands."""

import logging
from contextlib import suppress

from strands import tool  # pyright: ignore[reportUnknownVariableType]
from strands.types.exceptions import MaxTokensReachedException

from penstock import AgentWorkflow, AgentWorkflowContext
from penstock.integrations.strands import RolloutAgent, RolloutModel

from .agent import INSTRUCTIONS, SearchConfig, SearchGrader, SearchGraderConfig
from .library import lookup

__all__ = ["SearchGrader", "SearchGraderConfig", "StrandsSearch"]

logging.getLogger("strands").setLevel(logging.CRITICAL)  # it warns of every wrong call, and a policy in training makes many


@tool
def search(query: str) -> str:
    """Search the island's library."""
    return lookup(query)


class StrandsSearch(AgentWorkflow[SearchConfig]):
    """Strands runs the loop; a policy that never stops searching, or never stops talking, is cut off and graded as it stands."""

    async def run(self, ctx: AgentWorkflowContext[SearchConfig]) -> None:
        config = ctx.config or SearchConfig()
        agent = RolloutAgent(
            name="search",
            model=RolloutModel(params={"max_tokens": config.max_tokens}),
            system_prompt=INSTRUCTIONS,
            messages=ctx.prompt,
            tools=[search],
            callback_handler=None,
        )
        with suppress(MaxTokensReachedException):
            await agent.invoke_async(limits={"turns": config.max_turns})
