"""agent-framework: `response_format`, over each API."""

import asyncio

from agent_framework import Agent
from agent_framework_model import client_of
from person import QUESTION, STREAMS, WAY, Person, tell


async def main():
    agent = Agent(client=client_of(WAY), instructions="Answer.")
    if not STREAMS:
        return (await agent.run(QUESTION, options={"response_format": Person})).value
    parts = agent.run(QUESTION, options={"response_format": Person}, stream=True)
    async for _ in parts:
        pass
    return (await parts.get_final_response()).value


tell(asyncio.run(main()))
