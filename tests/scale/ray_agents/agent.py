"""An agent for Ray's workers: what it does stands in its task's metadata, and it notes where it ran and what it was answered."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext, get_rollout_context


class Noting(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        rollout, client, messages = get_rollout_context(), ctx.openai().with_options(max_retries=0), list[Any](ctx.prompt)
        note = Path(ctx.metadata["notes"]) / f"{rollout.rollout_id}.json"
        kind = ctx.metadata.get("do", "asks")
        if kind == "raises":
            raise ValueError("this row fails")
        if kind == "blocks" and rollout.rollout_id.endswith(".1"):
            time.sleep(3600)  # noqa: ASYNC251 - the agent that must not take others down
        try:
            for number in range(2):
                answer = await client.chat.completions.create(model="any", messages=messages)
                note.write_text(json.dumps({"pid": os.getpid(), "answered": number + 1}))
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": "more"},
                ]
        except asyncio.CancelledError:
            note.with_suffix(".cancelled").touch()
            raise


class Fine(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        ctx.set_reward(1.0)
