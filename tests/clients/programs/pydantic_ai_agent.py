"""A pydantic-ai agent with a tool, over each API."""

import asyncio

from conversation import DIALECT, INSTRUCTIONS, MODEL, QUESTIONS, STREAMS, add
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
agent = Agent(models[DIALECT](MODEL), instructions=INSTRUCTIONS, tools=[add])


async def read(_, events):
    async for _ in events:
        pass


async def main():
    history, streams = None, {"event_stream_handler": read} if STREAMS else {}  # `run_stream` ends where a call has text before it
    for question in QUESTIONS:
        result = await agent.run(question, message_history=history, **streams)
        print(result.output)
        history = result.all_messages()


asyncio.run(main())
