"""The agent of the demo: that of examples/multiply, but its calculator fails at times, so that the demo shows what a run loses."""

import random
import re
from typing import Any

from examples.multiply.agent import MULTIPLY, MultiplyConfig, product

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext

FAILS = 0.03
"""The share of rollouts with each of the troubles below."""


class DemoWorkflow(AgentWorkflow[MultiplyConfig]):
    async def run(self, ctx: AgentWorkflowContext[MultiplyConfig]) -> None:
        client, trouble = ctx.openai(), random.random() / FAILS
        messages: list[Any] = list(ctx.prompt)
        tools: list[Any] = [MULTIPLY]
        asked = await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=30)
        reply = asked.choices[0].message
        results = [(call.id, product(call)) for call in reply.tool_calls or []]
        if not results or any(result is None for _, result in results):
            return
        if trouble < 1:
            raise ConnectionError("the calculator did not answer")
        messages.append(reply.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": name, "content": str(result)} for name, result in results]
        greedy: Any = {"temperature": 0} if 1 <= trouble < 2 else {}
        await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=30, **greedy)
        if 2 <= trouble < 3:  # an agent that shortens its own history
            await client.chat.completions.create(model="policy", messages=messages[:1] + messages[2:], tools=tools, max_tokens=30)


class DemoGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        *_, before, last = ctx.sample.transcript
        text = last.get("content") or ""
        numbers = re.findall(r"-?\d+", text)
        right = bool(numbers) and numbers[-1] == ctx.label
        ctx.set_reward(1.0 if right and before["role"] == "tool" else 0.0)
        if not right and ctx.artifacts_dir:
            tool = f"the tool said {before['content']}" if before["role"] == "tool" else "the tool was not asked"
            (ctx.artifacts_dir / "note.txt").write_text(f"{ctx.label} was expected; {tool}, the last reply is {text!r}.\n")
