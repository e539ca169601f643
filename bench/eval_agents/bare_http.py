"""The same call on bare aiohttp, the least that an agent in Python can spend on it."""

from typing import Any

import aiohttp
import orjson

from penstock import AgentWorkflow, AgentWorkflowContext, Grader, GraderContext, get_rollout_context


class Connections:
    """Of all rollouts together; closed by whoever runs them."""

    def __init__(self) -> None:
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def shut(self) -> None:
        await self.session.close()


def session() -> aiohttp.ClientSession:
    """The one that the rollouts of this event loop share."""
    context = get_rollout_context()
    assert context is not None and context.clients is not None
    kept = context.clients.get_or_make(("bench", False), Connections)
    assert kept is not None
    return kept.session


class OneCall(AgentWorkflow[Any]):
    async def run(self, ctx: AgentWorkflowContext[Any]) -> None:
        body = orjson.dumps({"model": "policy", "messages": ctx.prompt})
        headers = {"authorization": f"Bearer {ctx.api_key}", "content-type": "application/json"}
        async with session().post(f"{ctx.base_url}/chat/completions", data=body, headers=headers) as response:
            assert response.status == 200
            orjson.loads(await response.read())


class Answered(Grader):
    async def grade(self, ctx: GraderContext) -> float:
        return float(len(ctx.sample.messages) == 2)
