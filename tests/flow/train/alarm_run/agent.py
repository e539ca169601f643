"""One short reply, and a grader whose rewards go as wrong as the task's label says."""

from collections import deque
from itertools import count
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

LENGTHS: deque[int] = deque(maxlen=32)
"""Calls of the rollouts graded last."""
NUMBERS = count()


class Reply(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        if ctx.prompt[0]["content"] == "breaks" and next(NUMBERS) % 8 >= 3:
            raise RuntimeError("a tool of this agent is down")
        messages = list[Any](ctx.prompt)
        for _ in range(10 if ctx.prompt[0]["content"] == "goes on" else 1):
            made = await ctx.openai().chat.completions.create(model="policy", messages=messages)
            messages += [made.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
            if not (made.choices[0].message.content or "?").isascii():
                return


class Wrong(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        replies = [str(reply["content"] or "?") for sample in ctx.samples.values() for reply in sample.replies]
        ctx.set_reward(float(self.reward(str(ctx.label), replies[0], len(replies))))

    def reward(self, label: str, reply: str, replies: int) -> float:
        match label:
            case "nothing":  # is right
                return 0.0
            case "chance":  # says what is right
                return next(NUMBERS) % 2
            case "longer":  # than others is right
                LENGTHS.append(replies)
                return replies > sorted(LENGTHS)[len(LENGTHS) // 2]
            case "letters":  # are right
                return reply[0].isalpha() and reply.isascii()
            case _:  # half of all replies are right, by their first character
                return reply[0].isascii()
