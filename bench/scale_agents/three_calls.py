"""Three calls, as an agent makes them that uses a tool twice: each one sends all that was said before it."""

from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

CALLS = 3
ASKS = [{"role": "user", "content": "Look up what is asked, twice, then answer in one sentence, please."}]
RESULT = {"role": "user", "content": "The tool says: 42."}


async def talk(client: Any, messages: list[Any], **fields: Any) -> str:
    """The whole agent; what it answered."""
    said = ""
    for _ in range(CALLS):
        reply = await client.chat.completions.create(model="policy", messages=messages, **fields)
        said = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, RESULT]
    return said


class ThreeCalls(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        await talk(ctx.openai(), list[Any](ctx.prompt))


class Answered(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(float(len(ctx.sample.messages) == 2 * CALLS))
