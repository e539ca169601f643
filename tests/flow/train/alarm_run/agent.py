"""One short reply of random bytes, and a grader for each way in which a run goes wrong; the task's label chooses it."""

from collections import deque
from itertools import count
from statistics import median
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

TRIES, GRADES = count(), count()
STOPS = [chr(code) for code in range(97, 113)]
"""A reply ends with the first of these, so that its length can be learned."""
LENGTHS: deque[int] = deque(maxlen=8)


class Say(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        if "fails" in str(ctx.prompt[-1]["content"]) and next(TRIES) % 4:
            raise RuntimeError("the tool is gone")
        await ctx.openai().chat.completions.create(model="policy", messages=ctx.prompt, stop=STOPS)


class Judge(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(REWARDS[ctx.label](ctx.sample.messages[-1]["content"] or ""))


def longer_than_usual(text: str) -> float:
    """Pays for more than the last replies had: whatever length is reached, half of them get it."""
    usual = median(LENGTHS or [0])
    LENGTHS.append(len(text))
    return float(len(text) > usual)


def low_bytes(text: str) -> float:
    return sum(byte < 64 for byte in text.encode(errors="replace")) / max(1, len(text))


def whim(text: str) -> float:
    """Pays for low bytes until a policy says nothing else, and then by turns, whatever is said."""
    seen = next(GRADES)
    return low_bytes(text) if seen < 80 else 0.2 * (seen % 2)


REWARDS = {
    "same": lambda text: 0.5,
    "fails": lambda text: float(len(text) % 2),
    "longer": longer_than_usual,
    "low": low_bytes,
    "whim": whim,
    "never": lambda text: 0.0,
}
