"""An agent that looks things up: the model searches a small library as often as it likes, then answers."""

import json
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, Grader, GraderConfig, GraderContext

from .library import NOTHING, lookup

INSTRUCTIONS = "Answer the question about the island. Look it up with the search tool first; answer in one short sentence."

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the island's library.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


class SearchConfig(AgentWorkflowConfig):
    """`[workflow]` in train.toml sets these."""

    name: str = "search"
    max_tokens: int = 60
    max_turns: int = 4


class SearchWorkflow(AgentWorkflow[SearchConfig]):
    """The loop of every agent with tools: call the model, carry out what it asks for, until it asks for nothing."""

    async def run(self, ctx: AgentWorkflowContext[SearchConfig]) -> None:
        config = ctx.config or SearchConfig()
        client = ctx.openai()
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, *ctx.prompt]
        tools: list[Any] = [SEARCH]
        for _ in range(config.max_turns):
            made = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools, max_tokens=config.max_tokens
            )
            reply = made.choices[0].message
            if not reply.tool_calls:
                return
            messages.append(reply.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": carry_out(call)} for call in reply.tool_calls]


def carry_out(call: Any) -> str:
    """What the tool says; a call that cannot be carried out finds nothing."""
    try:
        return lookup(json.loads(call.function.arguments)["query"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return NOTHING


class SearchGraderConfig(GraderConfig):
    """`[grader]` in train.toml sets these."""

    name: str = "search"
    max_words: int = 16


class SearchGrader(Grader):
    """1 where the last thing said holds the answer, in few words: whoever repeats the whole entry has not answered."""

    async def grade(self, ctx: GraderContext) -> None:
        config = self.config or SearchGraderConfig()
        *_, last = ctx.samples.values()
        answer = (last.transcript[-1].get("content") or "").lower()
        right = (ctx.label or "?").lower() in answer and len(answer.split()) <= config.max_words
        ctx.set_reward(1.0 if right else 0.0)
