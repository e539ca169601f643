"""A pydantic-ai agent with a tool, over each API."""

import asyncio

from conversation import DIALECT, INSTRUCTIONS, MODEL, QUESTIONS, STREAMS, add
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
agent = Agent(models[DIALECT](MODEL), instructions=INSTRUCTIONS, tools=[add])


async def main():
    history = None
    for question in QUESTIONS:
        if STREAMS:
            async with agent.run_stream(question, message_history=history) as result:
                print(await result.get_output())
        else:
            result = await agent.run(question, message_history=history)
            print(result.output)
        history = result.all_messages()


asyncio.run(main())
