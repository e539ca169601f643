"""The multiply example with grades of its steps too: one for a call that could be carried out, one for the answer."""

from examples.multiply import agent
from examples.multiply.agent import MultiplyWorkflow

from penstock import GraderContext

__all__ = ["GradedMultiply", "MultiplyWorkflow"]


class GradedMultiply(agent.MultiplyGrader):
    async def grade(self, ctx: GraderContext) -> None:
        await super().grade(ctx)
        *before, last = ctx.sample.steps
        for step in before:
            ctx.set_step_reward(step, 1.0)
        ctx.set_step_reward(last, ctx.reward or 0.0)
