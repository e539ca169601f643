"""AutoGen's AssistantAgent, which reflects on the tool's result in a call without tools."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_model import client_of
from conversation import DIALECT, INSTRUCTIONS, QUESTIONS, STREAMS, add


async def main():
    client = client_of(DIALECT)
    agent = AssistantAgent(
        "adder", client, tools=[add], system_message=INSTRUCTIONS, reflect_on_tool_use=True, model_client_stream=STREAMS
    )
    for question in QUESTIONS:
        print((await agent.run(task=question)).messages[-1].content)
    await client.close()


asyncio.run(main())
