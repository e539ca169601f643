"""Three short turns of free text, for `bench/drift.py`: each reply should begin with a letter of the half that its turn wants.

The reward is the share of turns that do. What a reply says is judged by its text, as graders do, not by its tokens.
"""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

WANTED = ("abcdefghijklm", "nopqrstuvwxyz", "abcdefghijklm")


class Letters(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        client, messages = ctx.openai(), list[Any](ctx.prompt)
        for _ in WANTED:
            made = await client.chat.completions.create(model="policy", messages=messages)
            reply = made.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and then?"}]


class LettersGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        replies = [str(reply["content"] or "?") for reply in ctx.sample.replies]
        ctx.set_reward(sum(reply[0] in wanted for reply, wanted in zip(replies, WANTED, strict=False)) / len(WANTED))
