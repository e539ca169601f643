"""The grader of the program: it reads what the gateway recorded, so it need not know what the agent is written in."""

import re

from penstock import Grader, GraderContext


class ProductGrader(Grader):
    """1 where the tool was used and the last number of the final answer is the label, else 0."""

    async def grade(self, ctx: GraderContext) -> None:
        *_, before, last = ctx.sample.transcript
        numbers = re.findall(r"-?\d+(?:\.\d+)?", (last.get("content") or "").replace(",", ""))
        right = bool(numbers) and float(numbers[-1]) == float(ctx.label or "nan")
        ctx.set_reward(1.0 if before["role"] == "tool" and right else 0.0)
