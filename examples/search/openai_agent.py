"""The search agent on the OpenAI Agents SDK: three agents in two conversations, all of them the same policy."""

from contextlib import suppress
from typing import Any

from agents import MaxTurnsExceeded, ModelBehaviorError, ModelSettings, Runner, function_tool

from penstock import AgentWorkflow, AgentWorkflowContext
from penstock.integrations.openai_agents import RolloutAgent, RolloutModel, RolloutSession

from .agent import SearchConfig, SearchGrader, SearchGraderConfig
from .library import lookup

__all__ = ["OpenAISearch", "SearchGrader", "SearchGraderConfig"]


@function_tool
def search(query: str) -> str:
    """Search the island's library."""
    return lookup(query)


class OpenAISearch(AgentWorkflow[SearchConfig]):
    """A planner says what to look for. An executor searches for it and hands over to a writer, who answers.

    Each session is a transcript: the planner has its own, executor and writer share one. The grader rewards the whole rollout,
    so all three learn from the answer.
    """

    async def run(self, ctx: AgentWorkflowContext[SearchConfig]) -> None:
        config = ctx.config or SearchConfig()
        messages: list[Any] = [*ctx.prompt]
        settings: dict[str, Any] = {"model": RolloutModel(), "model_settings": ModelSettings(max_tokens=config.max_tokens)}
        planner = RolloutAgent(name="planner", instructions="Name in a few words what to look up. Do not answer.", **settings)
        writer = RolloutAgent(name="writer", instructions="Answer the question in one short sentence.", **settings)
        executor = RolloutAgent(
            name="executor",
            instructions="Search for what the plan says. When you have found it, hand over to the writer.",
            tools=[search],
            handoffs=[writer],
            **settings,
        )
        with suppress(MaxTurnsExceeded, ModelBehaviorError):
            plan = await Runner.run(planner, messages, session=RolloutSession(name="planner"))
            messages.append({"role": "user", "content": f"The plan: {plan.final_output}"})
            await Runner.run(executor, messages, session=RolloutSession(name="executor"), max_turns=config.max_turns)
