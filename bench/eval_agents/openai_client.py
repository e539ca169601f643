"""One call through the client that a workflow is given."""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext


class OneCall(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        await ctx.openai().chat.completions.create(model="policy", messages=list[Any](ctx.prompt))


class Answered(Grader):
    async def grade(self, ctx: GraderContext) -> float:
        return float(len(ctx.sample.messages) == 2)
