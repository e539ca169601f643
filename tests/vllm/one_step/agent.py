"""An agent of one call, and a grader that distinguishes replies."""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext


class Ask(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        await ctx.openai().chat.completions.create(model="policy", messages=list[Any](ctx.prompt))


class Length(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(len(ctx.sample.messages[-1]["content"]) / 100)
