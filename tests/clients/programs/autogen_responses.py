"""AutoGen's OpenAIAgent, which speaks Responses and takes no tools of one's own."""

import asyncio

from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_ext.agents.openai import OpenAIAgent
from conversation import INSTRUCTIONS, MODEL, QUESTIONS
from openai import AsyncOpenAI


async def main():
    agent = OpenAIAgent("adder", "adds numbers", client=AsyncOpenAI(), model=MODEL, instructions=INSTRUCTIONS)
    for question in QUESTIONS:
        reply = await agent.on_messages([TextMessage(content=question, source="user")], CancellationToken())
        print(reply.chat_message.content)


asyncio.run(main())
