"""What the tests of the OpenAI Agents integration share: a rollout on a real gateway, and replies that call tools."""

import asyncio
import contextlib
import json
from typing import NamedTuple

import pytest
from agents import function_tool
from gateway_cases import renderer

from penstock import RolloutContext
from penstock.integrations.openai_agents import RolloutAgent, RolloutModel
from penstock.sdk.clients import Clients
from penstock.testing import ScriptedEngine, workbench

DEADLINE_S = 60
TWICE = pytest.mark.filterwarnings("ignore:asynchronous generator .* was scheduled after:ResourceWarning")
"""The SDK shuts the loop's generators down after each `run_sync` and then uses the loop again."""


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


def calls(name, **arguments):
    """A reply that calls one tool, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def agent(name="solver", **options):
    return RolloutAgent(**{"name": name, "instructions": f"You are {name}.", "model": RolloutModel(), **options})


class AgentsGateway(NamedTuple):
    """A gateway on a socket with a scripted engine, and rollouts on it."""

    bench: object
    engine: ScriptedEngine
    clients: Clients

    async def rollout(self, name="train-0"):
        """The context of a new rollout."""
        session = await self.bench.rollout(name)
        return RolloutContext(base_url=session.base_url, api_key=session.token, rollout_id=session.rollout_id, clients=self.clients)

    async def steps(self, context):
        """What was recorded of it: (transcript, reply) of each call."""
        attempt = await self.bench.pool.rollout(context.rollout_id)
        return [(step.transcript, step.message.get("content")) for step in sorted(attempt.steps, key=lambda step: step.index)]

    async def broken(self, context):
        """Why its calls did not all continue with the recorded tokens."""
        attempt = await self.bench.pool.rollout(context.rollout_id)
        return [node.reason for node in attempt.nodes if node.reason is not None]

    def prompt(self, place):
        """The text of one request to the engine."""
        return self.engine.tokenizer.decode(self.engine.prompts[place])


@contextlib.asynccontextmanager
async def agents_gateway(script):
    """Replies in order, or `script(prompt text)` where it is a function."""
    tokenizer = renderer().tokenizer
    replies = (lambda ids: script(tokenizer.decode(ids))) if callable(script) else script
    engine = ScriptedEngine(replies, tokenizer)
    async with asyncio.timeout(DEADLINE_S), workbench(engine, renderer(), serves=True) as bench:
        clients = Clients()
        try:
            yield AgentsGateway(bench, engine, clients)
        finally:
            await clients.close()


def run_in_rollout(script, play):
    """Run `play(gateway, context)` inside one rollout; what it returns."""

    async def main():
        async with agents_gateway(script) as gateway:
            context = await gateway.rollout()
            with context:
                return await play(gateway, context)

    return asyncio.run(main())
