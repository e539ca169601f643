"""A planner, an executor and a frozen judge in turn; the rewards of the first two depend on what each of them said."""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext


class Team(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        client, messages = ctx.openai(), list[Any](ctx.prompt)
        for model in ("planner", "executor", "judge"):
            reply = await client.chat.completions.create(model=model, messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": "Next?"}]


class Lengths(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        rewards = {name: float(len(ctx.samples[name].messages[-1]["content"]) % 3) for name in ("planner", "executor")}
        for name, reward in rewards.items():
            ctx.set_sample_reward(name, reward)
        ctx.set_reward(sum(rewards.values()))
