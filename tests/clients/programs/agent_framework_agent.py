"""An agent of Microsoft's agent-framework with a tool, over each API."""

import asyncio

from agent_framework import Agent
from agent_framework_model import client_of
from conversation import DIALECT, INSTRUCTIONS, QUESTIONS, STREAMS, add


async def main():
    agent = Agent(client=client_of(DIALECT), instructions=INSTRUCTIONS, tools=[add])
    session = agent.create_session()
    for question in QUESTIONS:
        if STREAMS:
            parts = agent.run(question, session=session, stream=True)
            async for _ in parts:
                pass
            print((await parts.get_final_response()).text)
        else:
            print((await agent.run(question, session=session)).text)


asyncio.run(main())
