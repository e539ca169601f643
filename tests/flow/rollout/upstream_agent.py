"""A rollout server on the upstream Osmosis SDK, in the environment of that SDK; prints its port. Arguments: integration, port."""

import sys

import uvicorn

from osmosis_ai.rollout import AgentWorkflow, Grader, LocalBackend, create_rollout_server


class StrandsWorkflow(AgentWorkflow):
    async def run(self, ctx):
        from strands import tool

        from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent

        @tool(name="multiply")
        def multiply(a: int, b: int) -> int:
            """Multiply two integers."""
            return a * b

        model = OsmosisRolloutModel(params={"temperature": 1.0})
        agent = OsmosisStrandsAgent(name="solver", model=model, tools=[multiply], messages=ctx.prompt, callback_handler=None)
        await agent.invoke_async()


class AgentsWorkflow(AgentWorkflow):
    async def run(self, ctx):
        from agents import ModelSettings, Runner, function_tool

        from osmosis_ai.rollout.integrations.agents.openai_agents import OsmosisAgent, OsmosisMemorySession, OsmosisRolloutModel

        @function_tool
        def multiply(a: int, b: int) -> int:
            """Multiply two integers."""
            return a * b

        settings = ModelSettings(temperature=1.0, max_tokens=200)
        agent = OsmosisAgent(name="solver", model=OsmosisRolloutModel(), model_settings=settings, tools=[multiply])
        await Runner.run(agent, ctx.prompt, session=OsmosisMemorySession(name="solver"))


class LastTextGrader(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, 1.0 if ctx.label in str(sample.messages[-1]) else 0.0)


if __name__ == "__main__":
    workflow = {"strands": StrandsWorkflow, "agents": AgentsWorkflow}[sys.argv[1]]
    app = create_rollout_server(backend=LocalBackend(workflow=workflow, grader=LastTextGrader))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
