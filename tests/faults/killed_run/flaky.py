"""The same two turns, but the first attempt at one place of each group fails after the first."""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext, get_rollout_context


class Flaky(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        client, messages = ctx.openai(), list[Any](ctx.prompt)
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": "Again?"}]
            if get_rollout_context().rollout_id.endswith(".1.1"):
                raise RuntimeError("the first attempt at this place fails")


class Length(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(float(len(ctx.sample.messages[-1]["content"]) % 3))
