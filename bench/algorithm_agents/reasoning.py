"""One reply to a question of reasoning-gym, scored as its families `chain_sum` and `letter_counting` do.

The answer alone earns 1; a reply that holds it among other text earns its share of the characters. `bench/reasoning_tasks.py`
checks that this is what reasoning-gym says, so that a run does not need that package. One difference: for `chain_sum` it takes
other spellings of a number too, such as 007.
"""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext


def score(reply: str, answer: str) -> float:
    return len(answer) / len(reply) if answer in reply else 0.0


class Answer(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        await ctx.openai().chat.completions.create(model="policy", messages=list[Any](ctx.prompt))


class ReasoningGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(score(str(ctx.sample.replies[-1]["content"] or "").strip(), str(ctx.label)))
