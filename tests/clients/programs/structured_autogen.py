"""AutoGen: an agent's `output_content_type`."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_model import client_of
from person import QUESTION, STREAMS, WAY, Person, tell


async def main():
    client = client_of(WAY)
    agent = AssistantAgent("teller", client, output_content_type=Person, model_client_stream=STREAMS)
    result = await agent.run(task=QUESTION)
    await client.close()
    return result.messages[-1].content


tell(asyncio.run(main()))
