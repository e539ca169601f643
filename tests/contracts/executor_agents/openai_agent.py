"""The same in the OpenAI Agents SDK: two runs on one session."""

from agents import Runner
from plain import Check

from penstock import AgentWorkflow
from penstock.integrations.openai_agents import RolloutAgent, RolloutModel, RolloutSession

__all__ = ["Check", "Talker"]


class Talker(AgentWorkflow):
    async def run(self, ctx):
        session = RolloutSession("talker")
        agent = RolloutAgent(name="talker", instructions="Obey.", model=RolloutModel())
        await Runner.run(agent, ctx.prompt[0]["content"], session=session)
        await Runner.run(agent, "say: more", session=session)
