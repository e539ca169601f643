"""A search task that a model of 135 million parameters can begin with: four worked examples, one search, a short answer.

A rollout earns a quarter for a search that could be made, a quarter if it found the answer, and half for the right answer in few
words. Its steps are graded too: the search for what it found, the answer for being right.
"""

import json
from typing import Any

from examples.search.agent import SEARCH, carry_out

from penstock import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, Grader, GraderContext

MAX_TOKENS, MAX_WORDS = 40, 6


def worked(question: str, query: str, found: str, answer: str) -> list[dict[str, Any]]:
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    call = {"id": f"call_{len(query)}", "type": "function", "function": function}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": f"{query}: {found}"},
        {"role": "assistant", "content": answer},
    ]


EXAMPLES = [
    *worked("Who painted the Lorne chapel?", "Lorne chapel", "Agnes Hoy painted the Lorne chapel in 1811.", "Agnes Hoy"),
    *worked("What does the Peel harbour sell?", "Peel harbour", "The Peel harbour sells green rope. It is small.", "green rope"),
    *worked("How old is the Duart oak?", "Duart oak", "The Duart oak is 300 years old. It is hollow.", "300 years"),
    *worked("Who owns the Colm bakery?", "Colm bakery", "The Colm bakery is owned by Ida Wren.", "Ida Wren"),
]


class WorkedSearch(AgentWorkflow[AgentWorkflowConfig]):
    async def run(self, ctx: AgentWorkflowContext[AgentWorkflowConfig]) -> None:
        client, tools, messages = ctx.openai(), [SEARCH], [*EXAMPLES, *ctx.prompt]
        for _ in range(2):
            made = await client.chat.completions.create(
                model="policy",
                messages=messages,  # pyright: ignore[reportArgumentType]
                tools=tools,  # pyright: ignore[reportArgumentType]
                max_tokens=MAX_TOKENS,
            )
            reply = made.choices[0].message
            if not reply.tool_calls:
                return
            messages.append(reply.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": carry_out(call)} for call in reply.tool_calls]


class WorkedSearchGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        label, transcript = (ctx.label or "?").lower(), ctx.sample.transcript
        answer = str(transcript[-1].get("content") or "").lower()
        searched = [str(message["content"]).lower() for message in transcript[len(EXAMPLES) :] if message["role"] == "tool"]
        found = any(label in text for text in searched)
        right = found and label in answer and len(answer.split()) <= MAX_WORDS
        *before, last = ctx.sample.steps
        for step in before:
            ctx.set_step_reward(step, 0.5 + 0.5 * found)
        ctx.set_step_reward(last, float(right))
        ctx.set_reward(0.25 * bool(searched) + 0.25 * found + 0.5 * right)
