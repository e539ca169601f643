"""Two turns about a number; the reward depends on the place in the group, so that every group has something to teach."""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext


class Ask(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        client, messages = ctx.openai(), list[Any](ctx.prompt)
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": "Again?"}]


class Length(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(float(ctx.sample.messages[1]["content"].endswith("0")))
