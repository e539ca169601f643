"""AutoGen's AssistantAgent, which reflects on the tool's result in a call without tools."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from conversation import INSTRUCTIONS, MODEL, QUESTIONS, STREAMS, add

INFO = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True}


async def main():
    client = OpenAIChatCompletionClient(model=MODEL, model_info=INFO)
    agent = AssistantAgent(
        "adder", client, tools=[add], system_message=INSTRUCTIONS, reflect_on_tool_use=True, model_client_stream=STREAMS
    )
    for question in QUESTIONS:
        print((await agent.run(task=question)).messages[-1].content)
    await client.close()


asyncio.run(main())
