"""The agent of `gpu/one_turn.py` on a client that does no more than post a body and read the answer."""

import re

import orjson

from bench.gpu.one_turn import EXAMPLES, SYSTEM, is_call
from penstock import AgentWorkflow, AgentWorkflowConfig, AgentWorkflowContext, Grader, GraderContext
from penstock.records import Message
from penstock.sdk.routing import RolloutContext, running_rollout
from penstock_compat.flows.client import FlowConnections


class BareConfig(AgentWorkflowConfig):
    name: str = "bare"


class BareWorkflow(AgentWorkflow[BareConfig]):
    async def run(self, ctx: AgentWorkflowContext[BareConfig]) -> None:
        await post(running_rollout("this agent"), ctx.prompt)


async def post(context: RolloutContext, prompt: list[Message]) -> None:
    assert context.clients is not None
    connections = context.clients.get_or_make(("bare", False), FlowConnections)
    assert connections is not None
    body = orjson.dumps({"model": "policy", "messages": [SYSTEM, *EXAMPLES, *prompt], "max_tokens": 48})
    headers = {"authorization": f"Bearer {context.api_key}", "content-type": "application/json"}
    async with connections.session.post(f"{context.base_url}/chat/completions", data=body, headers=headers) as answer:
        answer.raise_for_status()
        await answer.read()


class BareGrader(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        *_, question, reply = ctx.sample.transcript
        a, b = map(int, re.findall(r"\d+", question["content"]))
        ctx.set_reward(is_call(reply.get("content") or "", a, b))
