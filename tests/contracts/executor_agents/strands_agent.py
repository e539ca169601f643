"""The same in Strands: two turns of one agent."""

from plain import Check

from penstock import AgentWorkflow
from penstock.integrations.strands import RolloutAgent, RolloutModel

__all__ = ["Check", "Talker"]


class Talker(AgentWorkflow):
    async def run(self, ctx):
        agent = RolloutAgent(model=RolloutModel(params={"max_tokens": 64}), name="talker", callback_handler=None)
        await agent.invoke_async(ctx.prompt[0]["content"])
        await agent.invoke_async("say: more")
