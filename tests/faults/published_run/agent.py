"""Two calls; every answer that arrives, and every call that fails, is written down at once."""

import json
import os
from pathlib import Path
from typing import Any

from openai import OpenAIError

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext, get_rollout_context


class Talk(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        context = get_rollout_context()
        assert context is not None
        client, messages = ctx.openai(), list[Any](ctx.prompt)
        for _ in range(2):
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
            except OpenAIError as error:
                note("failed", context.rollout_id, str(error))
                raise
            said = reply.choices[0].message.content
            note("answered", context.rollout_id, reply.id, said or "")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again?"}]


class Parity(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(float(len(ctx.sample.messages[-1]["content"]) % 2))


def note(*parts: str) -> None:
    with Path(os.environ["PENSTOCK_TEST_NOTES"]).open("a") as notes:
        notes.write(json.dumps(parts) + "\n")
