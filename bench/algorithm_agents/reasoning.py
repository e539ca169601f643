"""One reply to a question of reasoning-gym, scored as its family does."""

import importlib
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext


class Answer(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        await ctx.openai().chat.completions.create(model="policy", messages=list[Any](ctx.prompt))


class ReasoningGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        known: Any = ctx.metadata or {}
        reasoning_gym: Any = importlib.import_module("reasoning_gym")
        score = reasoning_gym.get_score_answer_fn(known["family"])
        answer = str(ctx.sample.replies[-1]["content"] or "").strip()
        ctx.set_reward(float(score(answer, known["entry"])))
