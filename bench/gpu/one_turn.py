"""An agent of one turn: it writes the call of a tool as text, after two examples, and is done."""

import json
import re
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, Grader, GraderContext

SYSTEM = {"role": "system", "content": "Answer every question with one call of the tool multiply(a, b)."}


def example(a: int, b: int) -> list[dict[str, str]]:
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    return [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
    ]


EXAMPLES = [*example(7, 8), *example(23, 41)]


class OneTurnConfig(AgentWorkflowConfig):
    name: str = "one-turn"


class OneTurnWorkflow(AgentWorkflow[OneTurnConfig]):
    async def run(self, ctx: AgentWorkflowContext[OneTurnConfig]) -> None:
        await ask(ctx.openai(), ctx.prompt)


async def ask(client: Any, prompt: list[Any]) -> None:
    """The whole agent."""
    await client.chat.completions.create(model="policy", messages=[SYSTEM, *EXAMPLES, *prompt], max_tokens=48)


class OneTurnGrader(Grader):
    """1 for a call with the two numbers of the question, else 0."""

    async def grade(self, ctx: GraderContext) -> None:
        *_, question, reply = ctx.sample.transcript
        a, b = map(int, re.findall(r"\d+", question["content"]))
        ctx.set_reward(is_call(reply.get("content") or "", a, b))


def is_call(text: str, a: int, b: int) -> float:
    found = re.search(r"<tool_call>\s*(\{.*\})\s*</tool_call>", text, re.DOTALL)
    try:
        call: Any = json.loads(found[1]) if found else {}
        return float(call["name"] == "multiply" and call["arguments"] == {"a": a, "b": b})
    except (ValueError, KeyError, TypeError):
        return 0.0
